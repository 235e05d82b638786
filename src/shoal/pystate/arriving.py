"""A recipe arrives in a worker, with what the user's modules held where the study is run.

[Note: when modules get what they held]
First the modules are imported that the recipe refers to, and those that the main file imports for
what they do when they are; then all that are here get what they held there, in place: whoever has
``from config import cfg`` sees it. One that comes later gets it right after its import. So code at
the top level of modules finds what it finds where a file first imports them and then changes
``cfg``. Objects of such modules that the recipe itself refers to are those of this process. What
an import runs is what it ran there (``sentcode.py``).
"""

from __future__ import annotations

import importlib
import importlib.abc
import io
import pickle
import sys
import types
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from shoal.core.errors import SpecError, WorkerError
from shoal.pystate.bringing import ABSENT, Bringing, Later, fits, is_lost
from shoal.pystate.changes import left_undone, undo_changes
from shoal.pystate.fingerprints import Fingerprint
from shoal.pystate.modulestate import left_words
from shoal.pystate.sentcode import ModuleCode, forget_others
from shoal.pystate.standins import DECLARED, Large, Lost, declared_in
from shoal.pystate.statepickler import COMPARED, KEPT, LARGE, WHOLE
from shoal.pystate.values import PLAIN


class _StateReader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        self._whole: list[Any] = pickle.load(file)
        super().__init__(file)
        self._flat: dict[int, Any] = {}

    def persistent_load(self, pid: Any) -> Any:
        if not isinstance(pid, tuple):
            return ABSENT if pid == KEPT else Later(pid)
        kind, *content = pid
        if kind == LARGE:
            return Large(Fingerprint(*content))
        if kind == COMPARED:
            return Large(Fingerprint(*content), is_sure=False)
        if kind == WHOLE:
            return self._whole[content[0]]
        number, packed = content
        return self._flat.setdefault(number, pickle.loads(packed) if packed else None)

    def find_class(self, module: str, name: str, /) -> Any:
        try:
            return super().find_class(module, name)
        except Exception:  # whatever a module raises; a recipe's own import raises it again
            return type(name, (Lost,), {"__module__": module})


def read_state(packed: bytes) -> tuple[dict[str, dict[str, Any]], list[Any]]:
    """What came by module, and the objects that have numbers.

    Raises:
        Exception: something of it cannot be made again.
    """
    reader = _StateReader(io.BytesIO(packed))
    names: list[str] = reader.load()
    values: dict[str, dict[str, Any]] = {name: reader.load() for name in names}
    return values, reader.load()  # all by one memo


class _Unfit(Exception):
    """Nothing in this process has the parts that what came lacks."""


_LACKS = (
    "a part of it (an open file, a lock, what is larger than 1 MiB) stays there, and they have "
    "none in its place"
)


class _Arrival(importlib.abc.MetaPathFinder):
    """What came, and who still waits for it: modules that are not imported yet."""

    def __init__(self, codes: Mapping[str, ModuleCode]) -> None:
        self._codes, self._values = codes, dict[str, dict[str, Any]]()
        self.met: list[Any] = []
        self._bringing = Bringing()
        self._again: list[tuple[types.ModuleType, str, Any]] = []
        self._waiting: set[str] = set()
        self._left: dict[str, None] = {}  # in words, of values that could not be brought
        self._is_told = False  # what of it there was
        self._differing: dict[str, str] = {}  # by full name
        self.bring, self.has = self._bringing.bring, self._bringing.has

    def read(self, packed: bytes) -> None:
        """Take what came; to read it imports what it refers to."""
        self._values, self.met = read_state(packed)
        self._waiting = set(self._values)

    def fill_those_here(self) -> None:
        for name in self._values:
            if (module := sys.modules.get(name)) is not None:
                self.fill(module)

    def fill(self, module: types.ModuleType) -> None:
        name = module.__name__
        if name not in self._waiting:
            return
        self._waiting.remove(name)
        for path, came in self._values[name].items():
            self._put_or_tell(module, path, came)
        if self._differing:
            self._waiting.add(name)  # to be refused again, whoever imports it again

    def refuse_differing(self) -> None:
        """Refuse values that are too large to be sent, and others here.

        Raises:
            SpecError: there are some; names them.
        """
        if self._differing:
            some = "; ".join(f"{name}: {words}" for name, words in self._differing.items())
            raise SpecError(
                f"too large to be sent to workers, and not the same where they import it: {some}. "
                "Trials would train otherwise than the same model alone. Such a value is drawn "
                "without a seed, read from a clock, the environment or a file that has changed, "
                "or your file has set it after the import. Have the module draw it from a "
                "generator with a seed, or make it in Recipe(model=...) or Recipe(data=...)."
            )

    def complete(self, of_main: list[Any]) -> None:
        """Put what the main file defines where it belongs."""
        self._bringing.complete(of_main)
        again, self._again = self._again, []
        for place in again:
            self._put_or_tell(*place)

    def _put_or_tell(self, module: types.ModuleType, path: str, came: Any) -> None:
        try:
            self._put(module, path, came)
        except Exception as error:  # an object that lets nobody in, or is of another kind here
            why = str(error) if isinstance(error, _Unfit) else f"{type(error).__name__}: {error}"
            self._leave(module, path, why)

    def _leave(self, module: types.ModuleType, path: str, why: str) -> None:
        words = left_words(module.__name__, path, why)
        if self._is_told and words not in self._left:
            warnings.warn(words, stacklevel=2)  # a step has imported it: to the trial's log
        self._left[words] = None

    def tell_left(self) -> tuple[str, ...]:
        """What could not be brought so far; what comes later is warned of as it does."""
        self._is_told = True
        return tuple(self._left)

    def _put(self, module: types.ModuleType, path: str, came: Any) -> None:
        of_class, _, name = path.rpartition(".")
        home: Any = vars(module).get(of_class) if of_class else module
        if of_class and not isinstance(home, type):
            raise _Unfit("they have no such class")
        here = vars(home).get(name.removeprefix(DECLARED), ABSENT)
        here = declared_in(home) if name == DECLARED else here
        here = here.__func__ if isinstance(here, staticmethod | classmethod) else here
        if not fits(came, here):
            raise _Unfit(_LACKS)
        bringing, full_name = self._bringing, f"{module.__name__}.{path}"
        bringing.is_partial, bringing.lacking, bringing.differing = False, [], []
        brought = self.bring(came, here)
        if bringing.is_partial:
            self._again.append((module, path, came))
        if bringing.differing:
            self._differing[full_name] = "; ".join(bringing.differing)
        elif bringing.lacking:
            self._leave(module, path, "; ".join(bringing.lacking))
        is_same = type(brought) is type(here) and type(here) in PLAIN and brought == here
        if brought is here or brought is ABSENT or is_same:
            return
        if of_class:
            type.__setattr__(home, name, brought)
        else:
            vars(module)[name] = brought

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """As others find it, with the code that came, and filled when it has been imported."""
        code = self._codes.get(fullname)
        if fullname not in self._waiting and code is None:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        spec = spec if code is None else code.spec(fullname, spec)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self, code)
        return spec


class _Loader(importlib.abc.Loader):
    """Another one, which is told when a module has been imported."""

    def __init__(self, loader: Any, arrival: _Arrival, code: ModuleCode | None) -> None:
        self._loader, self._arrival, self._code = loader, arrival, code

    def create_module(self, spec: Any) -> types.ModuleType | None:
        made: types.ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        run = self._code.run if self._code is not None else self._loader.exec_module
        run(module)
        self._arrival.fill(module)
        self._arrival.refuse_differing()


class _RecipeReader(pickle.Unpickler):
    def __init__(self, packed: bytes, arrival: _Arrival) -> None:
        super().__init__(io.BytesIO(packed))
        self._arrival = arrival

    def persistent_load(self, pid: Any) -> Any:
        came = self._arrival.met[pid]
        if is_lost(came):
            importlib.import_module(type(came).__module__)  # raises why it cannot be
        if not self._arrival.has(came) and not fits(came, ABSENT):
            raise WorkerError(
                f"the recipe refers to an object, {type(came).__qualname__}, that a module of "
                "yours has in the study's process and not where it is imported, and a part of it "
                "cannot be sent to a worker (an open file, a lock). Make that object where the "
                "module is imported, or inside Recipe(model=...)."
            )
        return self._arrival.bring(came)


def arrive(
    arguments: Sequence[str],
    imports: Iterable[str],
    state: bytes,
    recipe: bytes,
    codes: Mapping[str, ModuleCode] = MappingProxyType({}),
) -> Any:
    """What ``recipe`` is, in a process whose modules hold what came with it.

    ``arguments`` are the command line's, which a module of the user's may read; ``imports`` the
    modules that come first, and ``codes`` what modules' imports run.

    Raises:
        SpecError: what is too large to be sent is another one here.
    """
    sys.meta_path[:] = [one for one in sys.meta_path if not isinstance(one, _Arrival)]
    undo_changes()  # modules that are imported now are to find none
    forget_others(codes)
    sys.argv[:] = arguments
    arrival = _Arrival(codes)
    sys.meta_path.insert(0, arrival)
    for name in imports:
        with suppress(Exception, SystemExit):  # who needs it imports it again, and raises
            importlib.import_module(name)
    arrival.read(state)
    arrival.fill_those_here()
    of_main, read = _RecipeReader(recipe, arrival).load()
    arrival.complete(of_main)
    arrival.refuse_differing()
    return read


def left_as_imported() -> tuple[str, ...]:
    """In words, what modules of this process hold otherwise than the study's, as it cannot go."""
    arrivals = [one for one in sys.meta_path if isinstance(one, _Arrival)]
    told = (words for arrival in arrivals for words in arrival.tell_left())
    return (*told, *left_undone())
