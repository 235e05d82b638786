"""The stand-in for CUDA does what it promises. Each case has a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from standin import ORDER, VARIABLE, can_build  # noqa: E402

pytestmark = [
    pytest.mark.timeout(600),  # the first of all builds the extension
    pytest.mark.skipif(not can_build(), reason="needs g++, ninja and a torch without CUDA"),
]

BEGIN = """
import torch
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)
assert torch.cuda.is_available()


def raises(kind, match, work):
    try:
        work()
    except kind as error:
        assert match in str(error), error
    else:
        raise AssertionError(f"nothing raised {kind}")


class Block(nn.Module):
    def __init__(self, drop=0.0):
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.attend = nn.MultiheadAttention(8, 2, drop, batch_first=True)
        self.norm, self.drop = nn.LayerNorm(8), nn.Dropout(drop)
        self.feed = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 11))

    def forward(self, tokens):
        x = self.words(tokens)
        x = x + self.drop(self.attend(x, x, x, need_weights=False)[0])
        return self.feed(self.norm(x))


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 3, groups=4), nn.ConvTranspose2d(4, 2, 2), nn.Flatten(),
            nn.LazyLinear(5),
        )

    def forward(self, x):
        return self.layers(x)


def train(model, batch, target, device, steps=3, make=torch.optim.AdamW, cast=False, **options):
    torch.manual_seed(1)
    model = model()
    with torch.no_grad():
        model(batch)  # lazy layers
    model.to(device)
    optimizer = make(model.parameters(), 1e-2, **options)
    batch, target = batch.to(device), target.to(device)
    kernel = torch.nn.attention.SDPBackend.MATH
    for _ in range(steps):
        with (
            torch.nn.attention.sdpa_kernel(kernel),
            torch.autocast(device, torch.bfloat16, enabled=cast),
        ):
            out = model(batch)
        loss = F.cross_entropy(out.float().flatten(0, -2), target.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    state = {**model.state_dict(), "loss": loss.detach()}
    return {key: value.cpu() for key, value in state.items()}


def same(*arguments, **options):
    one = train(*arguments, "cpu", **options)
    other = train(*arguments, "cuda", **options)
    for key, value in one.items():
        assert torch.equal(value, other[key]), (key, (value - other[key]).abs().max())


tokens = torch.randint(11, (2, 6))
pictures = torch.randn(3, 3, 8, 8)
"""

CASES = {
    "memory of what Python collects while memory is asked about": """
import faulthandler, gc

faulthandler.dump_traceback_later(15, exit=True)
told = []  # of which each dict is a new one, for which Python may collect
for threshold in range(1, 100):
    gc.set_threshold(threshold)
    ring = [torch.zeros(3, device="cuda")]
    ring.append(ring)
    del ring
    told.append(torch.cuda.memory_stats_as_nested_dict())
faulthandler.cancel_dump_traceback_later()
""",
    "arithmetic": """
x = torch.randn(4, 5)
y = x.cuda()
assert y.device == torch.device("cuda:0") and y.is_cuda
for work in (
    lambda t: t + 1, lambda t: 2 * t, lambda t: t @ t.T, lambda t: t.softmax(-1),
    lambda t: t.sort(dim=1)[1], lambda t: t[1:, ::2].contiguous(), lambda t: t[t > 0],
    lambda t: t.sum(), lambda t: t.clone().mul_(3), lambda t: t.view(2, 10).T.reshape(-1),
    lambda t: t.unfold(1, 2, 1), lambda t: torch.cat([t, t]).cumsum(0), lambda t: t.double(),
    lambda t: t.view(torch.int32), lambda t: torch.stack(t.split(1)), lambda t: t.nonzero(),
    lambda t: torch.einsum("ab,cb->ac", t, t), lambda t: torch.where(t > 0, t, 0.0),
    lambda t: t.to(torch.bfloat16).float(), lambda t: torch.fft.rfft(t).abs(),
    lambda t: torch.linalg.norm(t), lambda t: t.index_add(0, t[0, :2].long().abs() % 4, t[:2]),
):
    found = work(y)
    assert found.is_cuda and torch.equal(work(x), found.cpu())
out = torch.empty(0, device="cuda")
torch.add(y, 1, out=out)
assert torch.equal(out.cpu(), x + 1)
row = y[0]
row.zero_()
assert y[0].sum() == 0 and row._base is y
view = torch.empty(0, device="cuda").set_(y.untyped_storage(), 5, (2, 2), (5, 1))
assert torch.equal(view.cpu(), x[1:3, :2])
assert torch.arange(3, device="cuda").tolist() == [0, 1, 2]
assert torch.tril_indices(2, 2, device="cuda").is_cuda
assert torch.empty(8, device="cuda").isnan().all()
""",
    "devices that differ": """
x, host = torch.ones(3, 3, device="cuda"), torch.ones(3, 3)
said = "Expected all tensors to be on the same device"
raises(RuntimeError, said, lambda: x + host)
raises(RuntimeError, said, lambda: x.mul_(host))
raises(RuntimeError, said, lambda: x @ host)
raises(RuntimeError, said, lambda: F.linear(x, host))
raises(RuntimeError, said, lambda: F.embedding(host[0].long(), x))
raises(RuntimeError, said, lambda: F.cross_entropy(x, torch.zeros(3, dtype=torch.long)))
raises(RuntimeError, said, lambda: nn.LayerNorm(3)(x))
raises(RuntimeError, said, lambda: nn.Conv1d(3, 3, 1)(x[None]))
raises(RuntimeError, said, lambda: torch.cat([x, host]))
raises(RuntimeError, said, lambda: torch.equal(x, host))
raises(TypeError, "can't convert cuda:0", lambda: x.numpy())
weight = nn.Parameter(x.clone())
weight.grad = x.clone()
for options in ({"foreach": True}, {"fused": True}, {"foreach": False}):
    optimizer = torch.optim.AdamW([weight], **options)
    optimizer.step()
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].cpu()
    raises(RuntimeError, "", optimizer.step)
assert (x + torch.tensor(2.0)).is_cuda and x[torch.tensor([0])].is_cuda
x[torch.tensor([True, False, True])] = 5.0
""",
    "a transformer": "same(Block, tokens, tokens)",
    "a transformer, fused AdamW": "same(Block, tokens, tokens, fused=True)",
    "a transformer, one tensor at a time": "same(Block, tokens, tokens, foreach=False)",
    "a transformer, SGD": "same(Block, tokens, tokens, make=torch.optim.SGD, momentum=0.9)",
    "pictures": "same(Images, pictures, torch.tensor([1, 2, 3]))",
    "bfloat16": """
for state in [train(Block, tokens, tokens, "cuda", cast=True)]:
    assert state["loss"].isfinite()
with torch.autocast("cuda", torch.bfloat16):
    assert (torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")).dtype \\
        is torch.bfloat16
""",
    "LSTM and GRU": """
for kind in (nn.LSTM, nn.GRU):
    torch.manual_seed(0)
    cell = kind(3, 4, num_layers=2, batch_first=True)
    x = torch.randn(2, 5, 3)
    found = []
    for device in ("cpu", "cuda"):
        cell.to(device).zero_grad()
        out, _ = cell(x.to(device))
        out.square().sum().backward()
        found.append([out.detach().cpu(), *(p.grad.cpu().clone() for p in cell.parameters())])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other)
""",
    "memory": """
assert torch.cuda.memory_allocated() == 0
held = torch.empty(1000, dtype=torch.uint8, device="cuda")
stats = torch.cuda.memory_stats()
assert stats["requested_bytes.all.current"] == 1000
assert torch.cuda.memory_allocated() == stats["allocated_bytes.all.current"] == 1024
free, total = torch.cuda.mem_get_info()
assert free < total
raises(torch.OutOfMemoryError, "out of memory", lambda: torch.empty(total, device="cuda"))
del held
assert torch.cuda.memory_allocated() == 0 and torch.cuda.max_memory_allocated() == 1024
torch.cuda.reset_peak_memory_stats()
assert torch.cuda.max_memory_allocated() == 0
torch.cuda.empty_cache()
assert torch.cuda.memory_reserved() == 0
""",
    "pinned memory": """
runtime, page = torch.cuda.cudart(), torch.zeros(4096, dtype=torch.uint8)
assert not page.is_pinned()
assert int(runtime.cudaHostRegister(page.data_ptr(), 4096, 1)) == 0
assert page.is_pinned() and page[100:].is_pinned()
assert int(runtime.cudaHostRegister(page.data_ptr() + 8, 8, 1)) == 712
assert int(runtime.cudaHostUnregister(page.data_ptr())) == 0
assert int(runtime.cudaHostUnregister(page.data_ptr())) == 713
assert torch.zeros(3).pin_memory().is_pinned() and torch.empty(3, pin_memory=True).is_pinned()
""",
    "random numbers": """
x = torch.ones(64, device="cuda")
host = torch.get_rng_state()
state = torch.cuda.get_rng_state()
first, second = F.dropout(x), F.dropout(x)
assert not torch.equal(first, second)
torch.cuda.set_rng_state(state)
assert torch.equal(first, F.dropout(x)) and torch.equal(second, F.dropout(x))
assert torch.equal(host, torch.get_rng_state())
torch.manual_seed(5)
one = torch.randn(4, device="cuda")
torch.cuda.manual_seed(5)
assert torch.equal(one, torch.randn(4, device="cuda"))
generator = torch.Generator(device="cuda").manual_seed(5)
assert torch.equal(one, torch.randn(4, device="cuda", generator=generator))
raises(RuntimeError, "generator", lambda: torch.randn(4, device="cuda",
                                                      generator=torch.Generator()))
a, b = (train(lambda: Block(0.3), tokens, tokens, "cuda") for _ in range(2))
assert all(torch.equal(value, b[key]) for key, value in a.items())
""",
    "streams": """
stream, other = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
assert stream != other and torch.cuda.current_stream() == torch.cuda.default_stream()
start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
with torch.cuda.stream(stream):
    assert torch.cuda.current_stream() == stream
    start.record()
    x = torch.ones(3, device="cuda")
    end.record(stream)
x.record_stream(other)
other.wait_event(end)
other.wait_stream(stream)
assert end.query() and start.elapsed_time(end) >= 0
raises(TypeError, "stream", lambda: end.record(3))
raises(ValueError, "enable_timing", lambda: start.elapsed_time(other.record_event()))
raises(RuntimeError, "", torch.cuda.CUDAGraph)
""",
    "order of streams": """
stream, host = torch.cuda.Stream(), torch.ones(8).pin_memory()
x = torch.zeros(8, device="cuda")
said = "streams are not in order"
with torch.cuda.stream(stream):
    raises(RuntimeError, said, lambda: x.copy_(host, non_blocking=True))
    stream.wait_stream(torch.cuda.default_stream())
    x[:4].copy_(host[:4], non_blocking=True)
x[4:].add_(1)
raises(RuntimeError, said, lambda: x + 1)
done = stream.record_event()
raises(RuntimeError, said, lambda: x[2:].fill_(0))
torch.cuda.current_stream().wait_event(done)
assert (x + 1).tolist() == [2.0] * 8
x.mul_(1)
with torch.cuda.stream(stream):
    raises(RuntimeError, said, lambda: x.add_(1))
    torch.cuda.synchronize()
    x.add_(1)
    host.copy_(x, non_blocking=True)
torch.cuda.synchronize()
a = torch.ones(8, device="cuda")
torch.cuda.synchronize()
with torch.cuda.stream(stream):
    b = a * 2
del a  # stream may still be at it
raises(RuntimeError, said, lambda: torch.ones(8, device="cuda"))
torch.cuda.synchronize()
a = torch.ones(8, device="cuda", requires_grad=True)
torch.cuda.synchronize()
with torch.cuda.stream(stream):
    b = (a * 2).sum()
a.record_stream(stream)
b.backward()
del a, b
torch.ones(8, device="cuda")
""",
    "losses": """
for loss in (F.mse_loss, F.smooth_l1_loss, F.l1_loss, F.huber_loss):
    for reduction in ("mean", "sum", "none"):
        host = [torch.rand(4, 3) for _ in range(2)]
        found = []
        for device in ("cpu", "cuda"):
            x, y = (one.detach().to(device).requires_grad_() for one in host)
            made = loss(x, y, reduction=reduction)
            made.sum().backward()
            found.append([made.detach().cpu(), x.grad.cpu(), y.grad.cpu()])
        assert all(map(torch.equal, *found)), (loss, reduction)
""",
    "files": """
import io
held = io.BytesIO()
torch.save({"x": torch.arange(5, device="cuda")[1:]}, held)
held.seek(0)
assert torch.load(held)["x"].device == torch.device("cuda:0")
held.seek(0)
assert torch.load(held, map_location="cpu")["x"].tolist() == [1, 2, 3, 4]
storage = torch.ones(4, device="cuda").untyped_storage()
storage.resize_(0)
assert storage.nbytes() == 0
""",
}


HOST = """
import json, os, sys, traceback

for line in sys.stdin:
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            exec(json.loads(line), dict(globals()))
        except BaseException:
            os.write(write, traceback.format_exc()[-3000:].encode())
            os._exit(1)  # autograd's thread for the device may meet an interpreter that ends
        os._exit(0)
    os.close(write)
    _, status = os.waitpid(pid, 0)
    said = os.fdopen(read, "rb").read().decode()
    print(json.dumps([os.waitstatus_to_exitcode(status), said]), flush=True)
"""


@pytest.fixture(scope="module")
def host():
    """A process that has imported torch and the stand-in, and runs each program in a fork."""
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {VARIABLE: "1", ORDER: "1", "PYTHONPATH": path}
    command = [sys.executable, "-W", "error", "-c", BEGIN + HOST]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        yield process
        process.stdin.close()


@pytest.mark.sample(5)
@pytest.mark.parametrize("case", CASES)
def test_stand_in(case, host):
    host.stdin.write(json.dumps(textwrap.dedent(CASES[case])) + "\n")
    host.stdin.flush()
    code, said = json.loads(host.stdout.readline())
    assert code == 0, said
