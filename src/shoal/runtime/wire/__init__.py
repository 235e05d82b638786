"""What goes over the socket between the study's process and a worker."""
