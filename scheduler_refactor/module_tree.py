"""ModuleTree: import two versions of the same packages in one process.

Both versions keep their own module names, so class names, logger names and pickles are the same bytes in both. While a
tree is *active*, its modules are in ``sys.modules`` and its files are found first. Afterwards ``sys.modules`` is as it
was before. Nothing is written next to the sources, because bytecode is neither read nor written.

What a tree does not contain is shared by all trees with its state: the standard library, installed packages. A thread
of a tree that imports a module of it while the tree is not active finds the wrong one.

Modules of a tree see the clock of the tree: ``import time`` gives them a module whose functions read a `VirtualClock`
and whose ``sleep`` advances it. ``datetime.now()``, ``random`` and ``uuid`` are not replaced; pass your own modules for
them as ``replaced``.
"""

from __future__ import annotations

import builtins
import importlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

from scheduler_components._internal.virtual_clock import VirtualClock
from scheduler_components.errors import ConfigError

START_S = 1_700_000_000.0
"""The time of a tree at first, in seconds since 1970."""


def _time_module(clock: VirtualClock) -> ModuleType:
    """Return a replacement for the module ``time`` that reads ``clock``, and whose ``sleep`` advances it."""
    module = ModuleType("time")
    vars(module).update({name: value for name, value in vars(time).items() if not name.startswith("__")})
    for name in ("time", "monotonic", "perf_counter"):
        setattr(module, name, clock)
        setattr(module, f"{name}_ns", lambda: clock.now_ns)
    module.sleep = clock.advance  # type: ignore[attr-defined]
    return module


class ModuleTree:
    """One version of some top-level packages and modules.

    Args:
        packages: import name -> folder of the package, or file of the module.
        replaced: import name -> module that the tree's modules get instead. ``time`` is replaced by default.

    Raises:
        ConfigError: a name is taken by the standard library, or its folder or file does not exist.
    """

    def __init__(self, packages: Mapping[str, Path], *, replaced: Mapping[str, ModuleType] | None = None) -> None:
        for name, place in packages.items():
            if not name.isidentifier() or name in sys.stdlib_module_names:
                raise ConfigError("package", name, "is no name of its own", "give a name outside the standard library")
            if not place.exists():
                raise ConfigError("package", str(place), "does not exist", "give the folder of a package")
        self.packages = {name: place.resolve() for name, place in packages.items()}
        self.clock = VirtualClock(START_S)
        self._modules: dict[str, ModuleType] = {}
        self._code: dict[str, CodeType] = {}
        self._depth = 0
        self._finder = _TreeFinder(self)
        self._builtins = {**vars(builtins), "__import__": self._import}
        self._replaced = {"time": _time_module(self.clock), **(replaced or {})}

    @classmethod
    def below(cls, root: Path) -> ModuleTree:
        """Return the tree of all packages and modules directly below a folder.

        Raises:
            ConfigError: the folder has none.
        """
        found = {each.parent.name: each.parent for each in root.glob("*/__init__.py")}
        found |= {each.stem: each for each in root.glob("*.py") if each.stem.isidentifier()}
        found = {name: place for name, place in found.items() if name not in sys.stdlib_module_names}
        if not found:
            raise ConfigError("tree", str(root), "has no package", "give the folder above it, or NAME=FOLDER")
        return cls(found)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make the tree's modules those that imports find, until the block ends."""
        if self._depth:
            yield
            return
        hidden = self._remove_own_modules()
        sys.modules.update(self._modules)
        sys.meta_path.insert(0, self._finder)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            sys.meta_path.remove(self._finder)
            self._modules = self._remove_own_modules()
            sys.modules.update(hidden)

    def load(self, module: str) -> ModuleType:
        """Import a module of the tree, or any other."""
        with self.active():
            return importlib.import_module(module)

    def forget(self) -> None:
        """Import everything again at the next use, so that no module keeps state of before. Code stays compiled."""
        if self._depth:
            self._remove_own_modules()
        self._modules = {}

    def owns(self, module: str) -> bool:
        """Return whether the tree has a module of this name."""
        return module.partition(".")[0] in self.packages

    def _remove_own_modules(self) -> dict[str, ModuleType]:
        return {name: sys.modules.pop(name) for name in list(sys.modules) if self.owns(name)}

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        if not level and (module := self._replaced.get(name)) is not None:
            return module
        return builtins.__import__(name, globals, locals, fromlist or (), level)


class _TreeFinder(MetaPathFinder):
    """Finds the modules of one tree, whatever ``sys.path`` says."""

    def __init__(self, tree: ModuleTree) -> None:
        self._tree = tree

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if not self._tree.owns(fullname):
            return None
        if path is None:
            place = self._tree.packages[fullname]
            return self._file_spec(fullname, place) if place.is_file() else self._folder_spec(fullname, place)
        for folder in path:
            place = Path(folder) / fullname.rpartition(".")[2]
            file = place.with_name(f"{place.name}.py")
            if (place / "__init__.py").is_file() or not file.is_file():
                spec = self._folder_spec(fullname, place) or PathFinder.find_spec(fullname, [folder])  # an extension
            else:
                spec = self._file_spec(fullname, file)
            if spec is not None:
                return spec
        return None

    def _folder_spec(self, name: str, place: Path) -> ModuleSpec | None:
        file, folders = place / "__init__.py", [str(place)]
        if file.is_file():
            loader = self._loader(name, str(file))
            return spec_from_file_location(name, file, loader=loader, submodule_search_locations=folders)
        if not place.is_dir():
            return None
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = folders
        return spec

    def _file_spec(self, name: str, file: Path) -> ModuleSpec | None:
        return spec_from_file_location(name, file, loader=self._loader(name, str(file)))

    def _loader(self, name: str, path: str) -> _TreeLoader:
        return _TreeLoader(name, path, self._tree)


class _TreeLoader(SourceFileLoader):
    """Runs a module with the tree's own ``__import__``."""

    def __init__(self, fullname: str, path: str, tree: ModuleTree) -> None:
        super().__init__(fullname, path)
        self._tree = tree

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code = self._tree._code.get(path)
        if code is None:
            code = self._tree._code[path] = compile(self.get_data(path), path, "exec", dont_inherit=True)
        return code

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = self._tree._builtins
        super().exec_module(module)


def parse_tree(text: str) -> ModuleTree:
    """Return the tree that a user names: a folder with packages, or ``NAME=FOLDER`` for one package.

    Raises:
        ConfigError: there is no package.
    """
    name, separator, folder = text.partition("=")
    return ModuleTree({name: Path(folder)}) if separator else ModuleTree.below(Path(text))
