"""Loader processes: none can be lost, stuck or left behind without being noticed."""

from __future__ import annotations

import os
import signal
import time

import mishaps
import pytest
import torch
from mishaps import LENGTH, children
from torch.utils.data import DataLoader
from torch.utils.data._utils.signal_handling import _remove_worker_pids

from shoal.core.errors import TrialError
from shoal.data import Feed, loaders, processes, reader_of
from shoal.data.reading import END
from shoal.rng import capture_rng, same_rng, seed_all

CPU = torch.device("cpu")
STEPS = 2 * (LENGTH // 2 + 1)

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # on a machine of one core
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def no_process_is_left():
    before = children()
    yield
    assert children() <= before


@pytest.fixture
def flag(tmp_path):
    return tmp_path / "it has happened"


def make_loader(dataset, **options):
    return DataLoader(dataset, 2, **({"shuffle": True, "num_workers": 2} | options))


def read(feed, steps=STEPS, at=lambda step: None):
    """What a feed yields, with draws between; ``at`` is called before each step."""
    seen = []
    for step in range(steps):
        at(step)
        batch = feed.next()
        seen.append(batch if batch is None or isinstance(batch, bytes) else batch.flatten())
        torch.rand(step % 3)
    feed.close()
    return seen, capture_rng(CPU)


def read_well(loader):
    """The same loader without an accident."""
    loader.dataset.flag.touch()
    seed_all(5)
    seen = read(Feed(loader, CPU))
    loader.dataset.flag.unlink()
    return seen


def assert_same(first, second):
    assert [batch is None for batch in first[0]] == [batch is None for batch in second[0]]
    for one, other in zip(first[0], second[0], strict=True):
        same = torch.equal if isinstance(one, torch.Tensor) else lambda a, b: a == b
        assert same(one, other)
    assert same_rng(first[1], second[1])


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"persistent_workers": True}])
def test_a_loader_whose_process_is_killed_goes_on_with_the_same_bits(flag, options):
    loader = make_loader(mishaps.Killed(flag), **options)
    expected, reasons = read_well(loader), []

    seed_all(5)
    began = time.monotonic()
    found = read(Feed(loader, CPU, on_restart=reasons.append))

    assert_same(expected, found)
    assert len(reasons) == 1
    assert "was killed by SIGKILL. Restart 1 of 3, at epoch 1" in reasons[0]
    assert time.monotonic() - began < 10


def test_own_generators_are_where_they_were_after_a_restart(flag):
    options = {"sampler": torch.utils.data.RandomSampler(range(LENGTH), True), "shuffle": False}
    loader = make_loader(mishaps.Killed(flag), **options, generator=torch.Generator())
    state = loader.generator.get_state()
    expected = read_well(loader)
    loader.generator.set_state(state)

    seed_all(5)
    assert_same(expected, read(Feed(loader, CPU)))


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}])
def test_a_loader_that_is_lost_while_it_is_opened_draws_its_order_once(flag, options, monkeypatch):
    loader = make_loader(mishaps.Killed(flag), **options, generator=torch.Generator())
    state = loader.generator.get_state()
    expected, reasons = read_well(loader), []
    loader.generator.set_state(state)
    monkeypatch.setattr(loaders, "_start", LosesTheSecond(loaders._start))
    flag.touch()

    seed_all(5)
    assert_same(expected, read(Feed(loader, CPU, on_restart=reasons.append)))
    assert len(reasons) == 1
    assert reasons[0].endswith("Restart 1 of 3, at epoch 2, batch 1")


class LosesTheSecond:
    """Opens loaders; at the second time one dies at once."""

    def __init__(self, start):
        self.start, self.count = start, 0

    def __call__(self, loader):
        iterator, started = self.start(loader)
        self.count += 1
        if self.count == 2:
            processes.end_processes(iterator, started)
            raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")
        return iterator, started


def test_processes_that_live_on_are_missed_between_two_epochs(flag):
    loader = make_loader(mishaps.Killed(flag), persistent_workers=True)
    expected, reasons, before = read_well(loader), [], children()
    flag.touch()

    def kill(step):
        if step == LENGTH // 2 + 1:
            os.kill(min(children() - before), signal.SIGKILL)

    seed_all(5)
    assert_same(expected, read(Feed(loader, CPU, on_restart=reasons.append), at=kill))
    assert len(reasons) == 1


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_killed_between_two_steps_is_noticed_at_the_next(flag, victim):
    loader = make_loader(mishaps.Killed(flag))
    expected, reasons, before = read_well(loader), [], children()

    def kill(step):
        if step == 4:
            flag.touch()
            os.kill(sorted(children() - before)[victim], signal.SIGKILL)

    seed_all(5)
    loader.dataset.index = -1
    found = read(Feed(loader, CPU, on_restart=reasons.append), at=kill)

    assert_same(expected, found)
    assert len(reasons) == 1


def test_half_a_batch_in_the_pipe_is_waited_for_no_longer_than_its_writer_lives(flag):
    loader = make_loader(mishaps.Large(flag, index=-1), collate_fn=mishaps.as_bytes)
    expected, reasons, before = read_well(loader), [], children()

    def kill(step):
        if step == 3:
            os.kill(min(children() - before), signal.SIGKILL)

    seed_all(5)
    found = read(Feed(loader, CPU, on_restart=reasons.append), at=kill)

    assert_same(expected, found)
    assert len(reasons) == 1


def test_a_process_that_leaves_in_peace_is_missed_all_the_same(flag):
    loader = make_loader(mishaps.Leaving(flag), num_workers=1)
    expected, reasons = read_well(loader), []

    seed_all(5)
    assert_same(expected, read(Feed(loader, CPU, on_restart=reasons.append)))
    assert len(reasons) == 1


def test_after_three_restarts_the_trial_fails_and_the_error_names_the_loader(flag):
    reasons = []
    feed = Feed(make_loader(mishaps.KilledEachTime(flag)), CPU, on_restart=reasons.append)

    with pytest.raises(
        TrialError,
        match=r"loader was started again 3 times and lost again: DataLoader over KilledEachTime, "
        r"2 processes: process \d+ was killed by SIGKILL\. Look for",
    ):
        read(feed)
    assert len(reasons) <= 3


@pytest.mark.parametrize("kind", [mishaps.Stuck, mishaps.Stopped])
def test_a_loader_that_is_stuck_fails_its_trial_and_no_other(flag, kind):
    feed = Feed(make_loader(kind(flag)), CPU, timeout_s=0.5)

    with pytest.raises(
        TrialError,
        match=rf"the data \(DataLoader over {kind.__name__}, 2 processes\) gave no batch for "
        r"0\.5 s; its processes are stuck\. Read it with num_workers=0 to see where",
    ):
        read(feed)
    feed.close()


def test_a_limit_of_the_users_own_is_kept(flag):
    feed = Feed(make_loader(mishaps.Stuck(flag), timeout=1), CPU)

    with pytest.raises(TrialError, match="gave no batch for 1 s"):
        read(feed)
    feed.close()


def test_an_error_of_the_dataset_is_the_users_and_starts_nothing_again(flag):
    reasons = []
    feed = Feed(make_loader(mishaps.Noisy(flag)), CPU, on_restart=reasons.append)

    with pytest.raises(ValueError, match="this example is damaged"):
        read(feed)
    feed.close()
    assert reasons == []


def test_a_sampler_of_ones_own_needs_the_source_as_it_was_built(flag):
    def build():
        return make_loader(mishaps.Killed(flag), sampler=OwnSampler(), shuffle=False)

    expected = read_well(build())

    seed_all(5)
    with pytest.raises(TrialError, match="may keep something from the reading before"):
        read(Feed(build(), CPU))
    flag.unlink()

    seed_all(5)
    assert_same(expected, read(Feed(build(), CPU, renew=build)))


class OwnSampler(torch.utils.data.Sampler):
    rounds = 0

    def __len__(self):
        return LENGTH

    def __iter__(self):
        self.rounds += 1
        for index in range(LENGTH):
            yield (index * self.rounds + int(torch.randint(3, ()))) % LENGTH


# ------------------------------------------------------------------ ends


@pytest.mark.sample(4)
@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}])
@pytest.mark.parametrize("steps", [1, 5, 13, 15])
def test_no_process_outlives_close(options, steps):
    before = children()
    feed = Feed(make_loader(mishaps.Noisy(), **options), CPU)
    for _ in range(steps):
        feed.next()

    feed.close()

    assert children() <= before


def test_close_does_not_wait_for_a_process_that_is_stuck(flag):
    feed = Feed(make_loader(mishaps.Stuck(flag, index=4), shuffle=False), CPU)
    feed.next()

    began = time.monotonic()
    feed.close()

    assert time.monotonic() - began < 4


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}])
def test_processes_are_ended_without_torchs_own_way(options, monkeypatch):
    """As with a torch whose iterators have none of the private names."""
    monkeypatch.setattr(loaders, "_leave_writing_to_them", lambda iterator: None)
    start = loaders._start
    monkeypatch.setattr(loaders, "_start", lambda loader: Bare.around(*start(loader)))
    feed = Feed(make_loader(mishaps.Noisy(), **options), CPU)
    for _ in range(4):
        feed.next()

    feed.close()


class Bare:
    """An iterator and nothing else."""

    def __init__(self, iterator):
        self.iterator = iterator

    @classmethod
    def around(cls, iterator, started):
        # When it goes it would wait for a lock that a process held which was ended.
        iterator._shutdown_workers = lambda: None
        _remove_worker_pids(id(iterator))  # another one may get this number
        return cls(iterator), started

    def __next__(self):
        return next(self.iterator)


def test_torchs_alarm_is_off_so_that_it_rings_in_no_other_trial(flag):
    handler = signal.getsignal(signal.SIGCHLD)

    feed = Feed(make_loader(mishaps.Noisy()), CPU)
    feed.next()

    assert signal.getsignal(signal.SIGCHLD) is handler
    feed.close()


def test_a_reader_reads_data_that_is_not_trained_on(flag):
    """As validation data: a process that is lost is an error, and so is one that is stuck."""
    reader = reader_of(make_loader(mishaps.Killed(flag), shuffle=False))

    with pytest.raises(TrialError, match="was killed by SIGKILL"):
        read_all(reader)
    reader.close()
    assert len(read_all(reader)) == LENGTH // 2
    reader.close()


def read_all(reader):
    iterator = reader.open()
    return list(iter(lambda: reader.fetch(iterator), END))
