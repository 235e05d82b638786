"""Arrays on a device: their seats, and arrays that come and go shard by shard."""
