// A CUDA device for a torch without CUDA: its memory is host memory, its kernels are the CPU's.
// See README.md.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <unordered_set>

struct Clock : std::vector<uint64_t> {
  using std::vector<uint64_t>::vector;
};

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::Storage;
using c10::StorageImpl;
using c10::Stream;

constexpr size_t kRound = 512;
constexpr size_t kSegment = size_t(2) << 20;
constexpr size_t kWorkspace = (size_t(8) << 20) + (size_t(128) << 10);  // cuBLAS's default

int device_count = 1;
size_t total_memory = size_t(4) << 30;
thread_local DeviceIndex this_device = 0;
std::atomic<int> sync_debug{0};

void check_device(DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < device_count, "CUDA error: invalid device ordinal");
}

// ---------------------------------------------------------------- order

// Where it is asked for: each stream has a vector clock, each block of memory the accesses that
// not everybody is known to come after. What the host has waited for is before all that follows.
constexpr size_t kSmall = size_t(1) << 20;

struct Access {
  uintptr_t begin, end;
  size_t stream;
  uint64_t time;
  bool writes;
  std::string by;
};

struct Order {
  std::mutex mutex;
  std::map<std::pair<int, int64_t>, size_t> slots;
  std::vector<Clock> clocks;
  std::vector<std::string> names;
  Clock host;
  std::map<uintptr_t, std::vector<Access>> blocks;  // by where the block begins
  std::map<uintptr_t, uintptr_t> ends;
  std::map<uintptr_t, std::set<size_t>> recorded;
  std::map<uintptr_t, size_t> owners;
  // What used memory of a stream that is freed since: whoever has it next must come after it.
  // As in torch's allocator, what is larger than 1 MiB is not mixed with what is smaller.
  std::map<std::pair<size_t, bool>, std::map<size_t, Access>> freed;
};

std::atomic<bool> ordered{false};
std::atomic<int64_t> found_races{0};
Order& order() {
  static auto* found = new Order();
  return *found;
}

void join(Clock& clock, const Clock& with) {
  if (clock.size() < with.size()) clock.resize(with.size());
  for (size_t i = 0; i < with.size(); i++) clock[i] = std::max(clock[i], with[i]);
}

bool knows(const Clock& clock, size_t stream, uint64_t time) {
  return stream < clock.size() && clock[stream] >= time;
}

int64_t& current_stream_id(DeviceIndex index) {
  thread_local std::vector<int64_t> ids(16, 0);
  return ids[index];
}

// The functions with a trailing underscore want the lock held.
size_t slot_(int device, int64_t id) {
  auto& all = order();
  auto [at, is_new] = all.slots.emplace(std::make_pair(device, id), all.clocks.size());
  if (is_new) {
    all.clocks.emplace_back();
    all.names.push_back("stream " + std::to_string(id) + " of cuda:" + std::to_string(device));
  }
  return at->second;
}

Clock& tick_(size_t stream) {
  Clock& clock = order().clocks[stream];
  join(clock, order().host);
  if (clock.size() <= stream) clock.resize(stream + 1);
  clock[stream]++;
  return clock;
}

void prune_(std::vector<Access>& accesses) {
  const auto& host = order().host;
  accesses.erase(
      std::remove_if(
          accesses.begin(), accesses.end(),
          [&](const Access& a) { return knows(host, a.stream, a.time); }),
      accesses.end());
}

void note_allocated(uintptr_t begin, size_t bytes, int device) {
  if (!ordered || !bytes) return;
  auto& all = order();
  std::lock_guard<std::mutex> lock(all.mutex);
  const size_t stream = slot_(device, current_stream_id(DeviceIndex(device)));
  auto& accesses = all.blocks[begin];
  accesses.clear();
  for (auto& [_, one] : all.freed[{stream, bytes > kSmall}]) {
    if (knows(all.host, one.stream, one.time)) continue;
    accesses.push_back(one);
    accesses.back().begin = begin, accesses.back().end = begin + bytes;
  }
  all.ends[begin] = begin + bytes;
  all.owners[begin] = stream;
  all.recorded.erase(begin);
}

void note_freed(uintptr_t begin) {
  if (!ordered) return;
  auto& all = order();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto at = all.blocks.find(begin);
  if (at == all.blocks.end()) return;
  auto owner = all.owners.find(begin);
  if (owner != all.owners.end()) {
    prune_(at->second);
    auto& freed = all.freed[{owner->second, all.ends[begin] - begin > kSmall}];
    for (Access one : at->second) {
      if (one.stream != owner->second && all.recorded[begin].count(one.stream)) continue;
      one.writes = true;
      if (one.by.find(" to memory") == std::string::npos) one.by += ", to memory that is freed since,";
      auto [known, is_new] = freed.emplace(one.stream, one);
      if (!is_new && known->second.time < one.time) known->second = one;
    }
  }
  all.blocks.erase(begin);
  all.ends.erase(begin);
  all.owners.erase(begin);
  all.recorded.erase(begin);
}

void note_recorded(const void* pointer, Stream stream) {
  if (!ordered) return;
  auto& all = order();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto after = all.ends.upper_bound(reinterpret_cast<uintptr_t>(pointer));
  if (after == all.ends.begin()) return;
  all.recorded[std::prev(after)->first].insert(slot_(stream.device_index(), stream.id()));
}

struct Used {
  uintptr_t begin, end;
  bool writes;
};

Used used(const Tensor& tensor, bool writes) {
  if (tensor.numel() == 0) return {0, 0, writes};
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); i++) last += (tensor.size(i) - 1) * tensor.stride(i);
  const auto begin = reinterpret_cast<uintptr_t>(tensor.storage().data()) +
      tensor.storage_offset() * tensor.itemsize();
  return {begin, begin + (last + 1) * tensor.itemsize(), writes};
}

// An operator on the current stream uses memory: nobody else may be at it.
void note_used(const std::vector<Used>& uses, int device, const std::string& by) {
  auto& all = order();
  std::lock_guard<std::mutex> lock(all.mutex);
  const size_t stream = slot_(device, current_stream_id(DeviceIndex(device)));
  const Clock& clock = tick_(stream);
  for (const Used& use : uses) {
    if (use.begin == use.end) continue;
    auto after = all.ends.upper_bound(use.begin);
    if (after == all.ends.begin() || std::prev(after)->second <= use.begin) continue;
    auto& accesses = all.blocks[std::prev(after)->first];
    for (const Access& one : accesses) {
      if (one.begin >= use.end || one.end <= use.begin || !(one.writes || use.writes)) continue;
      if (one.stream == stream || knows(clock, one.stream, one.time)) continue;
      found_races++;
      TORCH_CHECK(
          false, "streams are not in order: ", by, (use.writes ? " writes on " : " reads on "),
          all.names[stream], " what ", one.by, (one.writes ? " writes on " : " reads on "),
          all.names[one.stream], ", and no event orders them");
    }
    accesses.erase(
        std::remove_if(
            accesses.begin(), accesses.end(),
            [&](const Access& one) {
              const bool covered = one.begin >= use.begin && one.end <= use.end;
              return covered && (use.writes || (one.stream == stream && !one.writes));
            }),
        accesses.end());
    if (accesses.size() > 32) prune_(accesses);
    accesses.push_back({use.begin, use.end, stream, clock[stream], use.writes, by});
  }
}

void follow_host_memory(uintptr_t begin, uintptr_t end) {
  if (!ordered) return;
  std::lock_guard<std::mutex> lock(order().mutex);
  order().blocks[begin].clear();
  order().ends[begin] = end;
}

// Whether copies may still be in flight.
bool forget_host_memory(uintptr_t begin) {
  if (!ordered) return false;
  auto& all = order();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto at = all.blocks.find(begin);
  if (at == all.blocks.end()) return false;
  prune_(at->second);
  const bool busy = !at->second.empty();
  all.blocks.erase(at);
  all.ends.erase(begin);
  return busy;
}

Clock mark(int device, int64_t id) {
  if (!ordered) return {};
  std::lock_guard<std::mutex> lock(order().mutex);
  return tick_(slot_(device, id));
}

void wait_for(int device, int64_t id, const Clock& clock) {
  if (!ordered) return;
  std::lock_guard<std::mutex> lock(order().mutex);
  join(order().clocks[slot_(device, id)], clock);
}

void host_waits(const Clock& clock) {
  if (!ordered) return;
  std::lock_guard<std::mutex> lock(order().mutex);
  join(order().host, clock);
}

void host_waits_for_stream(int device, int64_t id) { host_waits(mark(device, id)); }

void host_waits_for_all() {
  if (!ordered) return;
  std::lock_guard<std::mutex> lock(order().mutex);
  for (const Clock& clock : order().clocks) join(order().host, clock);
}

// ---------------------------------------------------------------- memory

struct Stat {
  int64_t current = 0, peak = 0, allocated = 0, freed = 0;
  void add(int64_t by) {
    current += by;
    peak = std::max(peak, current);
    (by > 0 ? allocated : freed) += std::abs(by);
  }
};

struct Pool {
  Stat asked, given, reserved, blocks;
  int64_t ooms = 0;
  double fraction = 1.0;  // of the device that this process may have
};

struct Block {
  size_t asked, given;
  DeviceIndex device;
};

std::mutex memory_mutex;
std::map<uintptr_t, Block>& blocks() {
  static auto* found = new std::map<uintptr_t, Block>();
  return *found;
}
std::vector<Pool>& pools() {
  static auto* found = new std::vector<Pool>(16);
  return *found;
}

void release(void* pointer) {
  if (!pointer) return;
  note_freed(reinterpret_cast<uintptr_t>(pointer));
  {
    std::lock_guard<std::mutex> lock(memory_mutex);
    auto at = blocks().find(reinterpret_cast<uintptr_t>(pointer));
    if (at != blocks().end()) {
      auto& pool = pools()[at->second.device];
      pool.asked.add(-int64_t(at->second.asked));
      pool.given.add(-int64_t(at->second.given));
      pool.blocks.add(-1);
      blocks().erase(at);
    }
  }
  std::free(pointer);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const Device device(DeviceType::CUDA, this_device);
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    const size_t given = (bytes + kRound - 1) / kRound * kRound;
    {
      std::lock_guard<std::mutex> lock(memory_mutex);
      auto& pool = pools()[this_device];
      if (pool.given.current + given > size_t(pool.fraction * total_memory)) {
        pool.ooms++;
        TORCH_CHECK_WITH(
            OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", bytes,
            " bytes. GPU ", int(this_device), " has a total capacity of ", total_memory,
            " bytes of which ", total_memory - pool.given.current,
            " bytes is free, and of which this process may have ",
            size_t(pool.fraction * total_memory), ". (a stand-in for CUDA)");
      }
      pool.asked.add(bytes);
      pool.given.add(given);
      pool.blocks.add(1);
      const int64_t segments = (pool.given.current + kSegment - 1) / kSegment * kSegment;
      const int64_t most = std::min<int64_t>(segments, pool.fraction * total_memory);
      if (most > pool.reserved.current) pool.reserved.add(most - pool.reserved.current);
    }
    void* pointer = nullptr;
    if (posix_memalign(&pointer, kRound, given) != 0) pointer = nullptr;
    TORCH_CHECK(pointer, "the stand-in for CUDA cannot allocate ", given, " bytes of the host");
    std::memset(pointer, 0xFF, given);  // NaN: nobody may rely on fresh memory
    note_allocated(reinterpret_cast<uintptr_t>(pointer), given, this_device);
    std::lock_guard<std::mutex> lock(memory_mutex);
    blocks()[reinterpret_cast<uintptr_t>(pointer)] = {bytes, given, this_device};
    return {pointer, pointer, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

DeviceAllocator& device_allocator() {
  static auto* found = new DeviceAllocator();
  return *found;
}

// Pinned host memory: [begin, end) of what torch allocated and of what was registered.
std::mutex pinned_mutex;
struct Pinned {
  uintptr_t end;
  bool registered;
};
std::map<uintptr_t, Pinned>& pinned() {
  static auto* found = new std::map<uintptr_t, Pinned>();
  return *found;
}

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  auto after = pinned().upper_bound(address);
  return after != pinned().begin() && address < std::prev(after)->second.end;
}

int host_register(uintptr_t begin, size_t bytes) {
  if (begin == 0 || bytes == 0) return 1;  // cudaErrorInvalidValue
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto after = pinned().lower_bound(begin + bytes);
  if (after != pinned().begin() && std::prev(after)->second.end > begin) return 712;
  pinned()[begin] = {begin + bytes, true};
  follow_host_memory(begin, begin + bytes);
  return 0;
}

int host_unregister(uintptr_t begin) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto at = pinned().find(begin);
  if (at == pinned().end() || !at->second.registered) return 713;
  pinned().erase(at);
  TORCH_CHECK(
      !forget_host_memory(begin),
      "streams are not in order: memory is unpinned while a copy may be in flight");
  return 0;
}

void release_pinned(void* pointer) {
  if (!pointer) return;
  {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned().erase(reinterpret_cast<uintptr_t>(pointer));
    forget_host_memory(reinterpret_cast<uintptr_t>(pointer));  // torch's own pool waits for it
  }
  std::free(pointer);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release_pinned, Device(DeviceType::CPU)};
    void* pointer = nullptr;
    if (posix_memalign(&pointer, kRound, bytes) != 0) pointer = nullptr;
    TORCH_CHECK(pointer, "cannot allocate ", bytes, " bytes of pinned memory");
    std::memset(pointer, 0xFF, bytes);
    std::lock_guard<std::mutex> lock(pinned_mutex);
    const auto begin = reinterpret_cast<uintptr_t>(pointer);
    pinned()[begin] = {begin + bytes, false};
    follow_host_memory(begin, begin + bytes);
    return {pointer, pointer, &release_pinned, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

PinnedAllocator& pinned_allocator() {
  static auto* found = new PinnedAllocator();
  return *found;
}

// ---------------------------------------------------------------- streams

std::atomic<int64_t> next_stream{1};

Stream stream_of(DeviceIndex index, int64_t id) {
  return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, index), id);
}

struct StandinEvent {
  std::chrono::steady_clock::time_point time;
  Clock clock;
};

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = DeviceType::CUDA;
  GuardImpl() = default;
  explicit GuardImpl(DeviceType) {}
  DeviceType type() const override { return DeviceType::CUDA; }
  DeviceIndex index(Device device) const {
    return device.has_index() ? device.index() : this_device;
  }
  Device exchangeDevice(Device device) const override {
    const Device old = getDevice();
    setDevice(device);
    return old;
  }
  Device getDevice() const override { return Device(DeviceType::CUDA, this_device); }
  void setDevice(Device device) const override {
    TORCH_INTERNAL_ASSERT(device.is_cuda());
    check_device(index(device));
    this_device = index(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) this_device = device.index();
  }
  Stream getStream(Device device) const override {
    return stream_of(index(device), current_stream_id(index(device)));
  }
  Stream getDefaultStream(Device device) const override { return stream_of(index(device), 0); }
  Stream getNewStream(Device device, int) const override {
    return stream_of(index(device), next_stream++);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream exchangeStream(Stream stream) const override {
    auto& current = current_stream_id(stream.device_index());
    const Stream old = stream_of(stream.device_index(), current);
    current = stream.id();
    return old;
  }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR > 10
  void* getStreamNativeHandle(const Stream stream) const override {
    return reinterpret_cast<void*>(stream.id());
  }
#endif
  DeviceIndex deviceCount() const noexcept override { return DeviceIndex(device_count); }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag)
      const override {
    if (!*event) *event = new StandinEvent();
    auto* made = static_cast<StandinEvent*>(*event);
    made->time = std::chrono::steady_clock::now();
    made->clock = mark(stream.device_index(), stream.id());
  }
  void block(void* event, const Stream& stream) const override {
    if (event)
      wait_for(stream.device_index(), stream.id(), static_cast<StandinEvent*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);
    return true;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<StandinEvent*>(event);
  }
  bool queryStream(const Stream& stream) const override {
    synchronizeStream(stream);
    return true;
  }
  void synchronizeStream(const Stream& stream) const override {
    host_waits_for_stream(stream.device_index(), stream.id());
  }
  void synchronizeEvent(void* event) const override {
    if (event) host_waits(static_cast<StandinEvent*>(event)->clock);
  }
  void synchronizeDevice(const DeviceIndex) const override { host_waits_for_all(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    note_recorded(data.get(), stream);
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    auto span = static_cast<StandinEvent*>(second)->time - static_cast<StandinEvent*>(first)->time;
    return std::chrono::duration<double, std::milli>(span).count();
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, GuardImpl)

// ---------------------------------------------------------------- random numbers

// As on CUDA, the state is a seed and an offset; each kernel that draws moves the offset on.
struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(DeviceIndex index)
      : GeneratorImpl(Device(DeviceType::CUDA, index), DispatchKeySet(DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(false));
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(
        state.numel() == 16 && state.device_type() == DeviceType::CPU &&
            state.dtype() == caffe2::TypeMeta::Make<uint8_t>(),
        "RNG state is wrong size");
    const auto* words = static_cast<const uint8_t*>(state.data());
    std::memcpy(&seed_, words, 8);
    std::memcpy(&offset_, words + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, at::kByte);
    auto* words = state.data_ptr<uint8_t>();
    std::memcpy(words, &seed_, 8);
    std::memcpy(words + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  at::Generator next() {
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t x = seed_ + 0x9E3779B97F4A7C15ull * (offset_ / 4 + 1);
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    offset_ += 4;
    return at::detail::createCPUGenerator(x ^ (x >> 31));
  }

 private:
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device().index());
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

const at::Generator& default_generator(DeviceIndex index) {
  static auto* made = new std::vector<at::Generator>([] {
    std::vector<at::Generator> all;
    for (int i = 0; i < 16; i++) all.push_back(at::make_generator<DeviceGenerator>(i));
    return all;
  }());
  const DeviceIndex which = index < 0 ? this_device : index;
  check_device(which);
  return (*made)[which];
}

at::Generator draw_from(const std::optional<at::Generator>& generator, DeviceIndex index) {
  const auto& used = generator && generator->defined() ? *generator : default_generator(index);
  TORCH_CHECK(
      used.device().is_cuda(), "Expected a 'cuda' device type for generator but found 'cpu'");
  return static_cast<DeviceGenerator*>(used.unsafeGetGeneratorImpl())->next();
}

// ---------------------------------------------------------------- an operator, on the CPU

struct Aliases {
  std::unordered_map<StorageImpl*, Storage> storages;
  std::unordered_map<c10::TensorImpl*, Tensor> aliases;          // of an original
  std::unordered_map<c10::TensorImpl*, Tensor> originals;        // of an alias
  std::unordered_map<StorageImpl*, Storage> original_storages;   // of an alias's storage
  std::unordered_set<c10::TensorImpl*> host;                     // arguments on the CPU
  std::optional<Device> device;

  Tensor alias(const Tensor& tensor) {
    auto* impl = tensor.unsafeGetTensorImpl();
    auto found = aliases.find(impl);
    if (found != aliases.end()) return found->second;
    if (!device) device = tensor.device();
    const Storage& storage = tensor.storage();
    auto* key = storage.unsafeGetStorageImpl();
    auto at = storages.find(key);
    if (at == storages.end()) {
      void* pointer = key->mutable_data();
      c10::DataPtr data(
          pointer, new Storage(storage), [](void* held) { delete static_cast<Storage*>(held); },
          Device(DeviceType::CPU));
      Storage made(
          Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(),
          true);
      original_storages.emplace(made.unsafeGetStorageImpl(), storage);
      at = storages.emplace(key, std::move(made)).first;
    }
    Tensor made = at::detail::make_tensor<c10::TensorImpl>(
        Storage(at->second), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
    made.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(
        tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.is_conj()) made._set_conj(true);
    if (tensor.is_neg()) made._set_neg(true);
    aliases.emplace(impl, made);
    originals.emplace(made.unsafeGetTensorImpl(), tensor);
    return made;
  }

  // What the operator resized is resized on the device.
  void settle() {
    for (auto& [_, original] : originals) {
      const Tensor& made = aliases.at(original.unsafeGetTensorImpl());
      auto& now = made.storage();
      auto held = original_storages.find(now.unsafeGetStorageImpl());
      const bool moved = held == original_storages.end() ||
          now.data() != original.storage().data() || now.nbytes() != original.storage().nbytes();
      if (!moved && made.sizes() == original.sizes() && made.strides() == original.strides() &&
          made.storage_offset() == original.storage_offset())
        continue;
      auto* impl = original.unsafeGetTensorImpl();
      if (moved) {
        Storage fresh = on_device(now);
        impl->set_storage_keep_dtype(fresh);
        impl->set_storage_offset(made.storage_offset());
      }
      impl->set_sizes_and_strides(made.sizes(), made.strides(), made.storage_offset());
    }
  }

  Storage on_device(const Storage& storage) {
    c10::DeviceGuard guard(*device);
    const size_t bytes = storage.nbytes();
    Storage made(
        Storage::use_byte_size_t(), bytes, device_allocator().allocate(bytes),
        &device_allocator(), true);
    if (bytes) std::memcpy(made.mutable_data(), storage.data(), bytes);
    return made;
  }

  Tensor over(Storage storage, const Tensor& like) {
    Tensor made = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), DispatchKeySet(DispatchKey::CUDA), like.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(
        like.sizes(), like.strides(), like.storage_offset());
    if (like.is_conj()) made._set_conj(true);
    if (like.is_neg()) made._set_neg(true);
    return made;
  }

  std::unordered_map<StorageImpl*, Storage> fresh;

  Tensor result(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
    auto* impl = tensor.unsafeGetTensorImpl();
    auto known = originals.find(impl);
    if (known != originals.end()) return known->second;
    if (host.count(impl) || tensor.layout() != at::kStrided) return tensor;
    auto* key = tensor.storage().unsafeGetStorageImpl();
    auto of_argument = original_storages.find(key);
    if (of_argument != original_storages.end()) return over(of_argument->second, tensor);
    auto at = fresh.find(key);
    if (at == fresh.end()) at = fresh.emplace(key, on_device(tensor.storage())).first;
    return over(at->second, tensor);
  }
};

std::unordered_set<std::string>& unchecked() {  // by torch's own list of operators
  static auto* found = new std::unordered_set<std::string>();
  return *found;
}

bool starts(const std::string& name, const char* with) { return name.rfind(with, 0) == 0; }

struct Traits {
  bool strict, mixes, draws, has_generator, multiplies, sorts, waits;
};

const Traits& traits_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<std::string, Traits>();
  const auto& name = op.operator_name();
  const std::string full = name.overload_name.empty() ? name.name
                                                      : name.name + "." + name.overload_name;
  std::lock_guard<std::mutex> lock(mutex);
  auto at = known->find(full);
  if (at != known->end()) return at->second;
  Traits found{};
  const std::string base = name.name.substr(name.name.find("::") + 2);
  const std::set<std::string> mixing = {
      "index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index",
      "_unsafe_index_put", "_pack_padded_sequence", "_pad_packed_sequence", "_ctc_loss",
      "_ctc_loss_backward", "is_set_to"};
  found.mixes = mixing.count(base);
  found.strict = starts(name.name, "aten::") && !unchecked().count(full.substr(6));
  if (starts(base, "_fused_")) found.strict = true;
  found.draws = op.hasTag(at::Tag::nondeterministic_seeded);
  for (const auto& argument : op.schema().arguments())
    if (argument.type()->str().find("Generator") != std::string::npos) found.has_generator = true;
  const std::set<std::string> products = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_",
                                          "_addmm_activation", "addmv", "addmv_", "mv"};
  found.multiplies = products.count(base);
  found.sorts = base == "sort";
  const std::set<std::string> waiting = {"_local_scalar_dense", "nonzero", "masked_select",
                                         "equal", "_unique2", "unique_consecutive",
                                         "unique_dim"};
  found.waits = waiting.count(base);
  return known->emplace(full, found).first->second;
}

void check_wait() {
  TORCH_CHECK(sync_debug != 2, "called a synchronizing CUDA operation");
  if (sync_debug == 1) TORCH_WARN("called a synchronizing CUDA operation");
}

// A library of products keeps a workspace of each thread and stream.
std::mutex workspace_mutex;
std::map<std::tuple<int, int, int64_t>, c10::DataPtr>& workspaces() {
  static auto* found = new std::map<std::tuple<int, int, int64_t>, c10::DataPtr>();
  return *found;
}

void take_workspace(Device device) {
  static std::atomic<int> threads{0};
  thread_local int thread = threads++;
  std::lock_guard<std::mutex> lock(workspace_mutex);
  const auto key = std::make_tuple(int(device.index()), thread, current_stream_id(device.index()));
  if (workspaces().count(key)) return;
  c10::DeviceGuard guard(device);
  workspaces().emplace(key, device_allocator().allocate(kWorkspace));
}

void clear_workspaces() {
  std::lock_guard<std::mutex> lock(workspace_mutex);
  workspaces().clear();
}

std::string name_of(const Device& device) { return device.str(); }

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Traits& traits = traits_of(op);
  const auto& schema = op.schema();
  const size_t arity = schema.arguments().size(), begin = stack->size() - arity;
  Aliases aliases;
  std::optional<Device> other;  // a tensor that lies elsewhere than the first on a GPU
  size_t bytes = 0;
  std::vector<Used> uses;
  bool is_view = false, writes = false;  // of the argument that is looked at

  if (traits.waits) check_wait();
  const auto note = [&](const Tensor& tensor) -> Tensor {
    if (!tensor.defined()) return tensor;
    if (tensor.is_cuda()) {
      if (aliases.device && *aliases.device != tensor.device()) other = tensor.device();
      TORCH_CHECK(
          tensor.layout() == at::kStrided, op.schema().name(), ": a sparse CUDA tensor is not in "
          "the stand-in");
      bytes = std::max(bytes, tensor.nbytes());
      if (ordered && !is_view) uses.push_back(used(tensor, writes));
      return aliases.alias(tensor);
    }
    if (tensor.device().is_cpu()) {
      aliases.host.insert(tensor.unsafeGetTensorImpl());
      const bool number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
      if (!traits.mixes && !number && (traits.strict || tensor.dim() > 0)) other = tensor.device();
    } else if (!traits.mixes) {
      other = tensor.device();
    }
    return tensor;
  };
  for (size_t i = begin; i < stack->size(); i++) {
    IValue& value = (*stack)[i];
    const auto* aliasing = schema.arguments()[i - begin].alias_info();
    writes = aliasing && aliasing->isWrite();
    is_view = aliasing && !writes;
    if (value.isTensor()) {
      value = IValue(note(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<Tensor> made;
      for (const Tensor& tensor : value.toTensorVector()) made.push_back(note(tensor));
      value = IValue(made);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> made;
      for (const std::optional<Tensor> tensor : value.toOptionalTensorList())
        made.push_back(tensor ? std::optional<Tensor>(note(*tensor)) : tensor);
      value = IValue(made);
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      const Device asked = value.toDevice();
      if (!aliases.device)
        aliases.device = Device(DeviceType::CUDA, asked.has_index() ? asked.index() : this_device);
      value = IValue(Device(DeviceType::CPU));
    }
  }
  if (!aliases.device) aliases.device = Device(DeviceType::CUDA, this_device);
  TORCH_CHECK(
      !other, "Expected all tensors to be on the same device, but found at least two devices, ",
      name_of(*aliases.device), " and ", other ? name_of(*other) : "",
      "! (when checking arguments of ", schema.name(), ")");

  if (ordered) {
    const int index = aliases.device->index();
    note_used(uses, index, schema.name());
    if (traits.waits) host_waits_for_stream(index, current_stream_id(DeviceIndex(index)));
  }
  if (traits.multiplies) take_workspace(*aliases.device);
  c10::DataPtr scratch;
  if (traits.sorts) {
    c10::DeviceGuard guard(*aliases.device);
    scratch = device_allocator().allocate(bytes);
  }

  at::AutoDispatchBelowADInplaceOrView below;
  const auto call = [&] { op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack); };
  if (traits.has_generator) {
    std::optional<at::Generator> drawn;
    for (size_t i = begin; i < stack->size(); i++) {
      IValue& value = (*stack)[i];
      const bool is_one = schema.arguments()[i - begin].type()->str().find("Generator") !=
          std::string::npos;
      if (!is_one) continue;
      std::optional<at::Generator> given;
      if (value.isGenerator()) given = value.toGenerator();
      value = IValue(draw_from(given, aliases.device->index()));
    }
    call();
  } else if (traits.draws) {
    static std::mutex swapping;
    std::lock_guard<std::mutex> lock(swapping);
    auto ours = draw_from(std::nullopt, aliases.device->index());
    auto theirs = at::detail::getDefaultCPUGenerator();
    const Tensor before = theirs.get_state();
    theirs.set_state(ours.get_state());
    try {
      call();
    } catch (...) {
      theirs.set_state(before);
      throw;
    }
    theirs.set_state(before);
  } else {
    call();
  }

  aliases.settle();
  for (size_t i = begin; i < stack->size(); i++) {
    IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = IValue(aliases.result(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<Tensor> made;
      for (const Tensor& tensor : value.toTensorVector()) made.push_back(aliases.result(tensor));
      value = IValue(made);
    }
  }
}

// ---------------------------------------------------------------- operators of its own

Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<Device> device, std::optional<bool> pin_memory,
    std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "only strided tensors");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, &device_allocator(), DispatchKeySet(DispatchKey::CUDA),
      dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())), format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator(), DispatchKeySet(DispatchKey::CUDA),
      dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())));
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  const bool crosses = self.is_cuda() != source.is_cuda();
  if (crosses) {
    const Tensor& host = self.is_cuda() ? source : self;
    if (!non_blocking || (!self.is_cuda() && !is_pinned(host.storage().data()))) check_wait();
  }
  if (ordered) {
    const int device = self.is_cuda() ? self.device().index() : source.device().index();
    std::vector<Used> uses;
    for (const Tensor* one : {&source, static_cast<const Tensor*>(&self)})
      if (one->is_cuda() || is_pinned(one->storage().data()))
        uses.push_back(used(*one, one == &self));
    note_used(uses, device, "copy_");
    const bool to_pageable = crosses && !self.is_cuda() && !is_pinned(self.storage().data());
    if (crosses && (!non_blocking || to_pageable))
      host_waits_for_stream(device, current_stream_id(DeviceIndex(device)));
  }
  Aliases aliases;
  const Tensor to = self.is_cuda() ? aliases.alias(self) : self;
  const Tensor from = source.is_cuda() ? aliases.alias(source) : source;
  at::AutoDispatchBelowADInplaceOrView below;
  to.copy_(from);
  return self;
}

Tensor& set_nothing(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  Storage storage(
      Storage::use_byte_size_t(), 0, device_allocator().allocate(0), &device_allocator(), true);
  return self.set_(std::move(storage), 0, {0}, {});
}

const Tensor& resize_(
    const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, size, format);
}

int64_t sdp_choice(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;  // plain products
}

void record_stream(Tensor& self, Stream stream) {
  TORCH_CHECK(
      stream.device_type() == DeviceType::CUDA, "record_stream takes a stream of the device");
  note_recorded(self.storage().data(), stream);
}

std::tuple<Tensor, Tensor> native_dropout(
    const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, at::kBool)};
  const double keep = 1 - p;
  Tensor mask = at::empty_like(input, input.options().dtype(at::kBool));
  mask.bernoulli_(keep);
  return {input.mul(mask).mul_(keep == 0 ? 0.0 : 1 / keep), mask};
}

Tensor plus(const Tensor& gates, const std::optional<Tensor>& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input, const Tensor& hidden, const Tensor& cx,
    const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  const Tensor gates = plus(input, input_bias) + plus(hidden, hidden_bias);
  const auto parts = gates.chunk(4, 1);
  const Tensor i = parts[0].sigmoid(), f = parts[1].sigmoid(), g = parts[2].tanh(),
               o = parts[3].sigmoid();
  const Tensor cy = f * cx + i * g;
  return {o * cy.tanh(), cy, at::cat({i, f, g, o}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const std::optional<Tensor>& grad_hy, const std::optional<Tensor>& grad_cy, const Tensor& cx,
    const Tensor& cy, const Tensor& workspace, bool has_bias) {
  const auto parts = workspace.chunk(4, 1);
  const Tensor &i = parts[0], &f = parts[1], &g = parts[2], &o = parts[3];
  const Tensor t = cy.tanh();
  const Tensor gh = grad_hy && grad_hy->defined() ? *grad_hy : at::zeros_like(cy);
  Tensor gc = gh * o * (1 - t * t);
  if (grad_cy && grad_cy->defined()) gc = gc + *grad_cy;
  const Tensor gates = at::cat(
      {gc * g * i * (1 - i), gc * cx * f * (1 - f), gc * i * (1 - g * g), gh * t * o * (1 - o)},
      1);
  return {gates, gc * f, has_bias ? gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input, const Tensor& hidden, const Tensor& hx,
    const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  const auto in = plus(input, input_bias).chunk(3, 1), of = plus(hidden, hidden_bias).chunk(3, 1);
  const Tensor r = (in[0] + of[0]).sigmoid(), z = (in[1] + of[1]).sigmoid();
  const Tensor n = (in[2] + r * of[2]).tanh();
  return {(hx - n) * z + n, at::cat({r, z, n, hx, of[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& grad, const Tensor& workspace, bool has_bias) {
  const auto parts = workspace.chunk(5, 1);
  const Tensor &r = parts[0], &z = parts[1], &n = parts[2], &hx = parts[3], &hn = parts[4];
  const Tensor gz = grad * (hx - n) * z * (1 - z), gn = grad * (1 - z) * (1 - n * n);
  const Tensor gr = gn * hn * r * (1 - r);
  const Tensor gi = at::cat({gr, gz, gn}, 1), gh = at::cat({gr, gz, gn * r}, 1);
  return {gi, gh, grad * z, has_bias ? gi.sum(0) : Tensor(), has_bias ? gh.sum(0) : Tensor()};
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("set_", TORCH_FN(set_nothing));
  m.impl(
      "set_.source_Storage",
      TORCH_FN(static_cast<Tensor& (*)(Tensor&, Storage)>(at::native::set_)));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("_fused_sdp_choice", TORCH_FN(sdp_choice));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("native_dropout", TORCH_FN(native_dropout));
  m.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  m.impl("_thnn_fused_lstm_cell_backward_impl", TORCH_FN(lstm_cell_backward));
  m.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  m.impl("_thnn_fused_gru_cell_backward", TORCH_FN(gru_cell_backward));
  // Composed of others on each device, by ways of its own: here as on the CPU.
  for (const char* name : {"convolution", "convolution_backward", "mse_loss", "smooth_l1_loss"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

// What has a kernel of its own on the CPU, and would be composed of others here, has the CPU's.
std::vector<std::string> take_kernels() {
  static auto* library = new torch::Library(
      torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  std::vector<std::string> taken;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = c10::Dispatcher::singleton().findOp(name);
    if (!op || !op->hasSchema() || !op->hasKernelForDispatchKey(DispatchKey::CPU) ||
        op->hasKernelForDispatchKey(DispatchKey::CUDA))
      continue;
    if (!op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) &&
        !op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd))
      continue;
    const std::string full = name.overload_name.empty() ? name.name
                                                        : name.name + "." + name.overload_name;
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
    taken.push_back(full);
  }
  return taken;
}

// ---------------------------------------------------------------- for Python

py::dict stat_of(const Stat& stat) {
  py::dict all, found;
  all["current"] = stat.current;
  all["peak"] = stat.peak;
  all["allocated"] = stat.allocated;
  all["freed"] = stat.freed;
  for (const char* name : {"all", "small_pool", "large_pool"}) found[name] = all;
  return found;
}

py::dict memory_stats(int index) {
  check_device(DeviceIndex(index));
  // Without the lock: what Python makes may collect garbage, and that give memory back here.
  const Pool pool = [&] {
    std::lock_guard<std::mutex> lock(memory_mutex);
    return pools()[index];
  }();
  py::dict found;
  found["requested_bytes"] = stat_of(pool.asked);
  found["allocated_bytes"] = stat_of(pool.given);
  found["active_bytes"] = stat_of(pool.given);
  found["reserved_bytes"] = stat_of(pool.reserved);
  found["allocation"] = stat_of(pool.blocks);
  found["active"] = stat_of(pool.blocks);
  found["segment"] = stat_of(pool.blocks);
  found["inactive_split"] = stat_of({});
  found["inactive_split_bytes"] = stat_of({});
  found["oversize_allocations"] = stat_of({});
  found["oversize_segments"] = stat_of({});
  found["num_alloc_retries"] = 0;
  found["num_ooms"] = pool.ooms;
  found["max_split_size"] = -1;
  return found;
}

void reset_peaks(int index) {
  check_device(DeviceIndex(index));
  std::lock_guard<std::mutex> lock(memory_mutex);
  Pool& pool = pools()[index];
  for (Stat* stat : {&pool.asked, &pool.given, &pool.reserved, &pool.blocks})
    stat->peak = stat->current;
}

void empty_cache() {
  std::lock_guard<std::mutex> lock(memory_mutex);
  for (Pool& pool : pools()) {
    const int64_t kept = (pool.given.current + kSegment - 1) / kSegment * kSegment;
    pool.reserved.add(std::min<int64_t>(kept, total_memory) - pool.reserved.current);
  }
}

}  // namespace

namespace at {

struct CUDAHooks final : CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  const Generator& getDefaultGenerator(DeviceIndex index) const override {
    return default_generator(index);
  }
  Generator getNewGenerator(DeviceIndex index) const override {
    const DeviceIndex which = index < 0 ? this_device : index;
    check_device(which);
    return make_generator<DeviceGenerator>(which);
  }
  Device getDeviceFromPtr(void* data) const override {
    std::lock_guard<std::mutex> lock(memory_mutex);
    auto after = blocks().upper_bound(reinterpret_cast<uintptr_t>(data));
    TORCH_CHECK(after != blocks().begin(), "not a pointer of the device");
    return Device(DeviceType::CUDA, std::prev(after)->second.device);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  DeviceIndex current_device() const override { return this_device; }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  Allocator* getCUDADeviceAllocator() const override { return &device_allocator(); }
  int getNumGPUs() const override { return device_count; }
  DeviceIndex deviceCount() const override { return DeviceIndex(device_count); }
  void deviceSynchronize(DeviceIndex) const override { host_waits_for_all(); }
  void setCurrentDevice(DeviceIndex index) const override {
    check_device(index);
    this_device = index;
  }
  DeviceIndex getCurrentDevice() const override { return this_device; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    const DeviceIndex old = this_device;
    if (index >= 0) setCurrentDevice(index);
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  std::string showConfig() const override { return "a stand-in for CUDA"; }
};

// `import torch` has asked for the hooks before this library is loaded, and keeps what it got: an
// object that refuses all. It has no members, nor has ours, so it is made one of ours in place.
void take_over_hooks() {
  static_assert(sizeof(CUDAHooks) == sizeof(CUDAHooksInterface));
  static auto* ours = new CUDAHooks();
  auto* theirs = const_cast<CUDAHooksInterface*>(&detail::getCUDAHooks());
  *reinterpret_cast<void**>(theirs) = *reinterpret_cast<void**>(ours);
}

}  // namespace at

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(DeviceType::CUDA, &device_allocator(), 1);
  at::take_over_hooks();
  m.def("configure", [](int devices, size_t memory, const std::vector<std::string>& names) {
    TORCH_CHECK(devices >= 1 && devices <= 16, "1 to 16 devices");
    device_count = devices;
    total_memory = memory;
    unchecked().insert(names.begin(), names.end());
  });
  m.def("take_kernels", &take_kernels);
  m.def("start", [] { at::globalContext().lazyInitDevice(DeviceType::CUDA); });
  m.def("hooked", [] { return at::detail::getCUDAHooks().hasCUDA(); });
  m.def("device_count", [] { return device_count; });
  m.def("get_device", [] { return int(this_device); });
  m.def("set_device", [](int index) {
    check_device(DeviceIndex(index));
    this_device = DeviceIndex(index);
  });
  m.def("exchange_device", [](int index) {
    const int old = this_device;
    if (index >= 0) {
      check_device(DeviceIndex(index));
      this_device = DeviceIndex(index);
    }
    return index < 0 ? -1 : old;
  });
  m.def("default_generator", [](int index) { return default_generator(DeviceIndex(index)); });
  m.def("current_stream", [](int index) { return current_stream_id(DeviceIndex(index)); });
  m.def("set_stream", [](int index, int64_t id) { current_stream_id(DeviceIndex(index)) = id; });
  m.def("memory_stats", &memory_stats);
  m.def("reset_peaks", &reset_peaks);
  m.def("empty_cache", &empty_cache);
  m.def("clear_workspaces", &clear_workspaces);
  m.def("set_fraction", [](double fraction, int index) {
    check_device(DeviceIndex(index));
    std::lock_guard<std::mutex> lock(memory_mutex);
    pools()[index].fraction = fraction;
  });
  m.def("get_fraction", [](int index) {
    check_device(DeviceIndex(index));
    std::lock_guard<std::mutex> lock(memory_mutex);
    return pools()[index].fraction;
  });
  m.def("mem_get_info", [](int index) {
    check_device(DeviceIndex(index));
    std::lock_guard<std::mutex> lock(memory_mutex);
    const size_t taken = pools()[index].reserved.current;
    return std::make_pair(total_memory - std::min(taken, total_memory), total_memory);
  });
  m.def("host_register", &host_register);
  m.def("host_unregister", &host_unregister);
  m.def("resize_storage", [](const Tensor& flat, size_t bytes) {
    auto* storage = flat.storage().unsafeGetStorageImpl();
    c10::DeviceGuard guard(flat.device());
    auto data = device_allocator().allocate(bytes);
    const size_t kept = std::min(bytes, storage->nbytes());
    if (kept) std::memcpy(data.get(), storage->data(), kept);
    storage->set_data_ptr_noswap(std::move(data));
    storage->set_nbytes(bytes);
  });
  py::class_<Clock>(m, "Clock");
  m.def("check_order", [](bool on) { ordered = on; });
  m.def("races", [] { return found_races.load(); });
  m.def("mark", &mark);
  m.def("wait_for", &wait_for);
  m.def("host_waits", &host_waits);
  m.def("host_waits_for_stream", &host_waits_for_stream);
  m.def("host_waits_for_all", &host_waits_for_all);
  m.def("set_sync_debug_mode", [](int mode) { sync_debug = mode; });
  m.def("get_sync_debug_mode", [] { return int(sync_debug); });
}
