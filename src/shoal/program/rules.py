"""The rules every action must obey, as a walk over what is where.

Each rule yields its complaint in words: what the action needs, what was found, what to
do. ``World`` is what the actions before it have made; it changes only in ``apply``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from shoal.program.ir import Action, Op, Part, lone_part
from shoal.program.needs import message_kind
from shoal.program.world import (
    BACKWARDS,
    GRAD,
    PARAM,
    STATE,
    Copy,
    Home,
    Tensor,
    World,
    is_batch,
    sent,
    tensor,
)

BOUNDARY, SAVED, HEAD = Part.BOUNDARY, Part.SAVED, Part.HEAD
NAMES = {PARAM: "parameters", STATE: "optimizer state", GRAD: "gradients", HEAD: "head"}


def complaints(world: World, device: int, action: Action) -> Iterator[str]:
    """The rules that this action breaks now, the most basic one first."""
    yield from _form(world, device, action)
    yield from _RULES[action.op](world, device, action)


def _form(world: World, device: int, action: Action) -> Iterator[str]:
    if action.trial not in world.costs:
        known = ", ".join(map(str, sorted(world.costs))) or "none"
        yield f"trial {action.trial} has no costs (known trials: {known}). Pass its JobCosts."
    elif action.shard >= len(world.costs[action.trial].shards):
        count = len(world.costs[action.trial].shards)
        yield f"the model has {count} shards, s0 to s{count - 1}. Name one of them."
    if action.op in (Op.LOAD, Op.STORE, Op.DROP) and not action.parts:
        yield f"{action.op} needs parts. Write param, state or grad, or some joined by +."
    if len(set(action.parts)) < len(action.parts):
        yield "a part is named twice. Name it once."
    if BOUNDARY in action.parts and len(action.parts) > 1:
        yield "a boundary is of one micro-batch, and is moved by itself. Make it its own action."
    if SAVED in action.parts and (action.op not in _SAVING or len(action.parts) > 1):
        yield (
            "what a forward saved is made by F, used by B, and moved by itself. Make it its own "
            "action, or remove the part."
        )
    if action.op in (Op.SEND, Op.RECV) and (len(action.parts) > 1 or STATE in action.parts):
        yield "a message is of one kind: a boundary, grad, norm, param, rng or sum. Name one."
    if action.own and (action.op is not Op.LOAD or action.parts != (PARAM,)):
        yield "only a LOAD of parameters alone takes memory of its own. Remove the word."
    if action.late and (action.op is not Op.LOAD or STATE not in action.parts):
        yield "only a LOAD of state takes a late slot. Remove the word."
    elif action.late and PARAM in action.parts:
        yield "a late slot is beside the parameters. LOAD those by themselves."
    if action.now and (action.op is not Op.DROP or not _WAITED & set(action.parts)):
        yield (
            "only a DROP of gradients, of a boundary or of what F saved is waited for. Remove the "
            "word."
        )
    is_told = bool({Part.NORM, Part.SUM, PARAM} & set(action.parts))
    with_micro = action.op in (Op.F, *BACKWARDS, Op.W) or lone_part(action) is not None
    with_micro |= BOUNDARY in action.parts
    with_micro |= action.op in (Op.SEND, Op.RECV) and not is_told
    if with_micro and action.micro is None:
        yield f"{action.op} needs a micro-batch. Write m0 or another one."
    if action.op in (Op.SEND, Op.RECV) and not _is_peer(world, device, action.peer):
        yield f"{action.peer} is no other device; there are {world.num_devices}. Name one as d0."
    if action.place == "host" and action.op is not Op.STEP:
        yield f"{action.op} cannot run on the host; only STEP can. Remove @host."


def _is_peer(world: World, device: int, peer: int | None) -> bool:
    return peer is not None and peer < world.num_devices and peer != device


def _move_lone(world: World, device: int, action: Action, part: Part) -> Iterator[str]:
    """What is of one micro-batch goes to the host while nobody needs it, and comes back."""
    moved = tensor(part, action, action.shard)
    here, away = (device, moved) in world.tensors, moved in world.away
    if action.op is Op.LOAD and not away:
        yield f"{moved} is not on the host. STORE it first."
    elif action.op is Op.LOAD and here:
        yield f"{moved} is on the device already. DROP it first."
    elif action.op is not Op.LOAD and not here:
        maker = f"F s{action.shard - 1} m{action.micro}"
        maker = maker if part is BOUNDARY else f"F s{action.shard} m{action.micro} saved"
        yield f"{moved} is not on the device. Put the {action.op} after {maker}."
    elif action.op is Op.DROP and not away:
        yield f"only the device has {moved}. STORE it first."
    elif action.op is Op.STORE and away:
        yield f"{moved} is on the host already. Store it once."


def _load(world: World, device: int, action: Action) -> Iterator[str]:
    if (lone := lone_part(action)) is not None:
        yield from _move_lone(world, device, action, lone)
        return
    copy, home = world.copy(device, action), world.home(action.trial, action.shard)
    name = f"s{action.shard}"
    if action.late and PARAM not in copy.present:
        yield f"a late slot is beside the parameters of {name}. LOAD those first."
    for part in action.parts:
        if part in copy.present:
            yield f"the {NAMES[part]} of {name} are on the device already. DROP them first."
        elif part is GRAD and not home.has_gradients:
            yield f"the host has no gradients of {name}. STORE them after B first."
        elif part not in home.current:
            yield (
                f"the host copy of the {NAMES[part]} of {name} is stale: the device has a newer "
                "one. STORE it first."
            )


def _store(world: World, device: int, action: Action) -> Iterator[str]:
    if (lone := lone_part(action)) is not None:
        yield from _move_lone(world, device, action, lone)
        return
    for part in action.parts:
        if part not in world.copy(device, action).present:
            yield (
                f"the {NAMES[part]} of s{action.shard} are not on the device. "
                "Put the STORE after what loads or makes them, and before the DROP."
            )
        elif part is PARAM and world.copy(device, action).own:
            yield (
                f"the parameters of s{action.shard} are in memory of their own, gone with the "
                "DROP. LOAD into a slot what is stored."
            )


def _drop(world: World, device: int, action: Action) -> Iterator[str]:
    if (lone := lone_part(action)) is not None:
        yield from _move_lone(world, device, action, lone)
        return
    copy = world.copy(device, action)
    for part in action.parts:
        if part not in copy.present:
            name = f"{NAMES[part]} of s{action.shard}"
            yield f"the {name} are not on the device. Drop what is there."
        elif part in copy.dirty:
            yield (
                f"the {NAMES[part]} of s{action.shard} are dirty: only the device has them. "
                "STORE them first."
            )
        elif part is PARAM and (saved := world.bound_by(device, action)):
            yield _refers(action, saved)
        elif part is PARAM and copy.late and STATE not in action.parts:
            yield f"the state of s{action.shard} is in a late slot beside them. DROP both."


def _refers(action: Action, saved: set[int | None]) -> str:
    micro = min(str(micro) for micro in saved)
    name = f"s{action.shard}"
    return (
        f"what F {name} m{micro} saved refers to the parameters of {name}. Put B {name} m{micro} "
        "saved before."
    )


def _unit(world: World, device: int, action: Action) -> Iterator[str]:
    """What F and B have in common."""
    alike = BACKWARDS if action.op in BACKWARDS else (action.op,)
    ran = {world.units.get((op, action.trial, action.shard, action.micro)) for op in alike}
    if action.version in ran:
        yield "this unit has run already. Every unit runs once; remove one of them."
    yield from _needs(world, device, action, (PARAM,))
    yield from _version(world, action)
    for wanted in world.inputs(action):
        if (device, wanted) not in world.tensors:
            maker = "B" if wanted.kind == "carry" else Op.F
            shard = wanted.shard - (wanted.kind == "boundary")
            if shard < 0:
                yield f"the batch of m{action.micro} is not on this device. Put its RECV before."
                continue
            if wanted in world.away:
                yield (
                    f"{action.op} needs {wanted}, which waits on the host. Put "
                    f"LOAD s{wanted.shard} m{action.micro} {wanted.kind} before."
                )
                continue
            yield (
                f"{action.op} needs {wanted}, which is not on this device. Put {maker} s{shard} "
                f"m{action.micro}, or a RECV of it, before."
            )


def _needs(world: World, device: int, action: Action, parts: tuple[Part, ...]) -> Iterator[str]:
    if world.costs[action.trial].shards[action.shard].head_bytes:
        parts = (*parts, HEAD)
    missing = [p for p in parts if p not in world.copy(device, action).present]
    if missing:
        names = " and ".join(NAMES[part] for part in missing)
        yield (
            f"{action.op} needs the {names} of s{action.shard} on the device. "
            f"Put LOAD s{action.shard} {'+'.join(missing)} before it."
        )


def _version(world: World, action: Action) -> Iterator[str]:
    group = world.group_of(action)
    due = max(group - world.kept_versions + 1, 0)
    if world.ends and action.version != due:
        yield (
            f"m{action.micro} is of group {group}, which runs with version {due} where "
            f"{world.kept_versions} versions are kept, not {action.version}. Write v{due}."
        )
    newest = world.home(action.trial, action.shard).version
    oldest = max(newest - world.kept_versions + 1, 0)
    if action.version > newest:
        yield (
            f"version {action.version} of s{action.shard} does not exist yet: it has been stepped "
            f"{newest} times. Use version {newest}, or put its STEP before."
        )
    elif action.version < oldest:
        yield (
            f"version {action.version} of s{action.shard} is gone: it has been stepped {newest} "
            f"times and {world.kept_versions} versions are kept. Put the {action.op} before the "
            "STEP."
        )


def _forward(world: World, device: int, action: Action) -> Iterator[str]:
    if action.trial in world.has_backward and world.is_last(action):
        yield "the last shard has no F in training: its B runs the first forward. Remove the F."
    if SAVED in action.parts and not world.goes_back(action):
        yield "nothing goes backwards here. Remove the part."
    yield from _unit(world, device, action)


def _backward(world: World, device: int, action: Action) -> Iterator[str]:
    yield from _same_version(world, action)
    yield from _same_saving(world, device, action)
    yield from _unit(world, device, action)
    home, copy = world.home(action.trial, action.shard), world.copy(device, action)
    name = f"s{action.shard}"
    if home.has_gradients and GRAD not in copy.present:
        yield (
            f"earlier micro-batches' gradients of {name} are on the host: this B must add to "
            f"them. Put LOAD {name} grad before it."
        )
    if action.op is Op.B:
        yield from _in_order(world, action)


def _in_order(world: World, action: Action) -> Iterator[str]:
    key = (action.trial, action.shard, world.group_of(action))
    last = world.last_micro.get(key, -1)
    if action.micro is not None and action.micro < last:
        yield (
            f"{action.op} s{action.shard} m{last} has run already: gradients are added in the "
            "order of the plain loop. Put the micro-batches in order."
        )


def _weights_of(world: World, device: int, action: Action) -> Iterator[str]:
    """The second half of a backward: the gradients of the parameters."""
    name = f"s{action.shard} m{action.micro}"
    found = world.halves.get((action.trial, action.shard, action.micro))
    if found is None or found[0] != device:
        yield f"W needs I {name} to have run here, once for every W. Put it before."
    elif found[1].version != action.version:
        yield f"W uses version {action.version} but I {name} used {found[1].version}. Use that."
    yield from _needs(world, device, action, (PARAM,))
    yield from _in_order(world, action)


def _same_version(world: World, action: Action) -> Iterator[str]:
    if world.is_last(action):
        return
    name = f"F s{action.shard} m{action.micro}"
    version = world.units.get((Op.F, action.trial, action.shard, action.micro))
    if version is None:
        yield f"B needs {name} to have run. Put it before."
    elif version != action.version:
        yield (
            f"B uses version {action.version} but {name} used version {version}. Use the same "
            "weights for both."
        )


def _same_saving(world: World, device: int, action: Action) -> Iterator[str]:
    name = f"F s{action.shard} m{action.micro}"
    saved = action.micro in world.saved_by(device, action)
    if SAVED in action.parts and not saved:
        yield f"{name} saved nothing. Write {name} saved, or B without it, which recomputes."
    elif saved and SAVED not in action.parts:
        yield f"{name} saved what B needs. Write B s{action.shard} m{action.micro} saved."


def _step(world: World, device: int, action: Action) -> Iterator[str]:
    yield from _version_of_step(world, action)
    left = _backwards_left(world, action, world.done_first(action.version))
    if left:
        yield (
            f"{left} B of s{action.shard} come later, and their gradients would miss this step. "
            "Put the STEP after them."
        )
    if action.trial in world.has_sync and world.syncs[action.trial] <= action.version:
        yield ("this program clips: the factor is known only after SYNC. Put the STEP after it.")
    elif action.trial in world.has_sync and world.sync_on[action.trial] != device:
        yield from _factor(world, device, action)
    if world.kept_versions == 1 and (saved := world.saved_by(device, action)):
        yield _refers(action, saved)
    if action.place == "host":
        yield from _host_step(world, action)
    else:
        yield from _needs(world, device, action, (PARAM, STATE, GRAD))


def _factor(world: World, device: int, action: Action) -> Iterator[str]:
    there = world.sync_on[action.trial]
    shards = range(len(world.costs[action.trial].shards))
    norms = (Tensor("norm", action.trial, shard, None, action.version) for shard in shards)
    if not any((device, norm) in world.told for norm in norms):
        yield (
            f"the clipping factor of step {action.version} is on device {there}. Put RECV of its "
            "norm before."
        )


def _backwards_left(world: World, action: Action, newest: int) -> int:
    """B of this shard still to come whose group, or weights, are ``newest`` or older.

    Of groups the earlier ones have been stepped: steps come one after another.
    """
    if world.ends:
        return world.backwards_left[action.trial, action.shard, newest]
    return sum(
        count
        for (trial, shard, version), count in world.backwards_left.items()
        if (trial, shard) == (action.trial, action.shard) and version <= newest
    )


def _version_of_step(world: World, action: Action) -> Iterator[str]:
    newest = world.home(action.trial, action.shard).version
    if action.version != newest:
        yield (
            f"s{action.shard} has been stepped {newest} times, so this STEP starts from version "
            f"{newest}, not {action.version}. Step every shard once for its gradients."
        )


def _host_step(world: World, action: Action) -> Iterator[str]:
    home, name = world.home(action.trial, action.shard), f"s{action.shard}"
    if not home.has_gradients or GRAD not in home.current:
        yield f"the host does not have all gradients of {name}. STORE them after the last B first."
    for (device, trial, shard), copy in world.copies.items():
        if (trial, shard) == (action.trial, action.shard) and copy.present:
            parts = "+".join(sorted(copy.present))
            yield (
                f"device {device} still holds {parts} of {name}, which this step makes stale. "
                "DROP them first."
            )


def _sync(world: World, device: int, action: Action) -> Iterator[str]:
    shards = range(len(world.costs[action.trial].shards))
    left = sum(
        _backwards_left(world, replace(action, shard=shard), action.version) for shard in shards
    )
    if left:
        yield f"{left} B come later, and their gradients would miss the norm. Put SYNC after them."
    for shard in shards:
        wanted = Tensor("norm", action.trial, shard, None, action.version)
        is_here = world.num_devices == 1 or (action.trial, shard) in world.stepped_on[device]
        if not is_here and (device, wanted) not in world.told:
            yield f"{wanted} is on another device. RECV it before."
    if action.version != world.syncs[action.trial]:
        yield f"this is SYNC number {world.syncs[action.trial]}. Use one SYNC a step."


def _send(world: World, device: int, action: Action) -> Iterator[str]:
    kind = sent(action).kind
    if kind == "norm":
        yield from _send_norm(world, device, action)
    elif kind == "weights":
        yield from _send_weights(world, device, action)
    elif kind == "sum":
        yield from _send_sum(world, action)
    elif kind == "rng":
        ran = [world.units.get((op, action.trial, action.shard, action.micro)) for op in _UNITS]
        if ran == [None] * len(_UNITS):
            yield f"no unit of s{action.shard} m{action.micro} has run. Put the SEND after it."
    elif (device, sent(action)) not in world.tensors and not is_batch(action):
        yield f"{sent(action)} is not on this device. Put the unit that leaves it before the SEND."


def _send_norm(world: World, device: int, action: Action) -> Iterator[str]:
    if _backwards_left(world, action, world.done_first(action.version)):
        yield "gradients are still to come, and the norm would miss them. Put the SEND after them."
    has_sync = world.sync_on.get(action.trial) == device
    if has_sync and world.syncs[action.trial] <= action.version:
        yield "the factor is known only after SYNC. Put the SEND after it."


def _send_sum(world: World, action: Action) -> Iterator[str]:
    name = f"s{action.shard}"
    if _backwards_left(world, action, world.done_first(action.version)):
        yield "gradients are still to come, and the sum would miss them. Put the SEND after them."
    newest = world.home(action.trial, action.shard).version
    if not 0 <= action.version - newest < world.kept_versions:
        yield (
            f"{name} has been stepped {newest} times, and gradients for step {action.version} are "
            "gone or not there yet. Send them once, before their STEP."
        )


def _send_weights(world: World, device: int, action: Action) -> Iterator[str]:
    for trial, shard in sorted(world.stepped_on[device]):
        newest = world.home(trial, shard).version
        if trial == action.trial and not 0 <= newest - action.version < world.kept_versions:
            yield (
                f"s{shard}, which is stepped here, is at version {newest}. Send version "
                f"{action.version} after the STEP that makes it, and before it is gone."
            )


def _receive(world: World, device: int, action: Action) -> Iterator[str]:
    queue = world.messages.get((action.peer or 0, device, message_kind(action)))
    if queue and queue[0] != sent(action):
        yield (
            f"device {action.peer} sent {queue[0]} first. Receive from a device in the order in "
            "which it sends."
        )


def _nothing(world: World, device: int, action: Action) -> Iterator[str]:
    return iter(())


_UNITS = (Op.F, *BACKWARDS)
_SAVING = (*_UNITS, Op.LOAD, Op.STORE, Op.DROP)
_WAITED = {GRAD, BOUNDARY, SAVED}
_RULES: dict[Op, Callable[[World, int, Action], Iterator[str]]] = {
    Op.LOAD: _load,
    Op.STORE: _store,
    Op.DROP: _drop,
    Op.F: _forward,
    Op.B: _backward,
    Op.I: _backward,
    Op.W: _weights_of,
    Op.STEP: _step,
    Op.SYNC: _sync,
    Op.SEND: _send,
    Op.RECV: _receive,
    Op.CKPT: _nothing,
}


def apply(world: World, device: int, action: Action) -> None:
    """What is where once this action is done."""
    if action.op in (Op.SEND, Op.RECV):
        _apply_message(world, device, action)
        return
    copy, home = world.copy(device, action), world.home(action.trial, action.shard)
    parts = set(action.parts)
    if (lone := lone_part(action)) is not None:
        _apply_lone(world, device, action, lone)
        return
    match action.op:
        case Op.LOAD:
            copy.present |= parts
            copy.own |= action.own
            copy.late |= action.late
        case Op.STORE:
            copy.dirty -= parts
            home.current |= parts
            home.has_gradients |= GRAD in parts
        case Op.DROP:
            copy.present -= parts
            copy.own &= PARAM in copy.present
            copy.late &= STATE in copy.present
        case Op.W:
            _apply_sum(world, device, action)
        case Op.F | Op.B | Op.I:
            _apply_unit(world, device, action)
        case Op.STEP:
            _apply_step(world, copy, home, action)
        case Op.SYNC:
            world.syncs[action.trial] += 1


def _apply_message(world: World, device: int, action: Action) -> None:
    if action.op is Op.SEND:
        channel = (device, action.peer or 0, message_kind(action))
        world.messages.setdefault(channel, deque()).append(sent(action))
        world.tensors.pop((device, sent(action)), None)
        return
    channel = (action.peer or 0, device, message_kind(action))
    arrived = world.messages[channel].popleft()
    if message_kind(action) > 1:
        world.told.add((device, arrived))
    else:
        world.tensors[device, arrived] = action


def _apply_lone(world: World, device: int, action: Action, part: Part) -> None:
    moved = tensor(part, action, action.shard)
    if action.op is Op.STORE:
        world.away[moved] = action
    elif action.op is Op.DROP:
        del world.tensors[device, moved]
    else:
        world.tensors[device, moved] = action


def _apply_unit(world: World, device: int, action: Action) -> None:
    world.units[action.op, action.trial, action.shard, action.micro] = action.version
    if action.op in BACKWARDS or not world.goes_back(action):
        for used in world.inputs(action):
            del world.tensors[device, used]
            world.away.pop(used, None)
    if action.op is Op.F:
        if not world.is_last(action):
            world.tensors[device, tensor("boundary", action, action.shard + 1)] = action
        if SAVED in action.parts:
            world.saved_by(device, action).add(action.micro)
            world.tensors[device, tensor("saved", action, action.shard)] = action
        return
    if action.shard and (action.trial, action.shard - 1) not in world.onward:
        world.tensors[device, tensor("carry", action, action.shard)] = action
    if action.op is Op.I:
        world.saved_by(device, action).add(action.micro)
        world.halves[action.trial, action.shard, action.micro] = (device, action)
    else:
        _apply_sum(world, device, action)


def _apply_sum(world: World, device: int, action: Action) -> None:
    """Gradients of the parameters are added up."""
    key = (action.trial, action.shard, world.group_of(action))
    world.halves.pop((action.trial, action.shard, action.micro), None)
    world.saved_by(device, action).discard(action.micro)
    world.summed.setdefault(key[:2], set()).add(key[2])
    copy = world.copy(device, action)
    copy.present.add(GRAD)
    copy.dirty.add(GRAD)
    world.home(action.trial, action.shard).current.discard(GRAD)
    world.backwards_left[key] -= 1
    world.last_micro[key] = action.micro or 0


def _apply_step(world: World, copy: Copy, home: Home, action: Action) -> None:
    groups = world.summed.pop((action.trial, action.shard), set())
    later = {group for group in groups if world.ends and group > home.version}
    if later:
        world.summed[action.trial, action.shard] = later
    home.version += 1
    home.has_gradients = False
    home.current.discard(GRAD)
    if action.place == "device":
        if not later:
            copy.present.discard(GRAD)
            copy.dirty.discard(GRAD)
        changed = {PARAM, STATE} | ({HEAD} & copy.present)
        copy.dirty |= changed
        home.current -= changed
