"""Each use of a host attribute has one kind, however it is written: small methods with all their uses, read by hand."""

from __future__ import annotations

import ast
from textwrap import dedent, indent

import pytest

from scheduler_refactor.host_access import Access, AccessReader, Origin

FLAT = [
    # Plain uses
    ("read", "return self.a", "read:a"),
    ("rebind", "self.a = 1", "rebind:a"),
    ("augmented", "self.a += 1", "read:a rebind:a"),
    ("annotated", "self.a: int = 1", "rebind:a"),
    ("declared only", "self.a: int", ""),
    ("deleted", "del self.a", "delete:a"),
    ("called", "self.a(1)", "call:a"),
    ("awaited call", "await self.a()", "call:a"),
    ("read of a value's part", "return self.a.b.c", "read:a"),
    ("read of an element", "return self.a[self.b]", "read:a read:b"),
    ("several targets", "self.a = self.b = self.c", "read:c rebind:a rebind:b"),
    ("condition", "if self.a and not self.b:\n    self.c = 1", "read:a read:b rebind:c"),
    ("compared", "return self.a is self", "read:a"),
    ("text", "return f'{self.a!r:>{self.b}}'", "read:a read:b"),
    # Changes in place
    ("part rebound", "self.a.b = 1", "mutate:a"),
    ("part augmented", "self.a.b += 1", "mutate:a"),
    ("deep part augmented", "self.a.b.c[0] += self.d", "mutate:a read:d"),
    ("element rebound", "self.a[self.b] = 1", "read:b mutate:a"),
    ("slice rebound", "self.a[1:self.n] = []", "mutate:a read:n"),
    ("element deleted", "del self.a[0], self.b.c", "mutate:a mutate:b"),
    ("container changed", "self.a.append(self.b)", "mutate:a read:b"),
    ("container of an element changed", "self.a[0].b.update(c=1)", "mutate:a"),
    ("container read", "return self.a.copy()", "invoke:a.copy"),
    ("method of the value", "self.a.run(self.b)", "invoke:a.run read:b"),
    ("method of a part", "self.a.b.run()", "invoke:a.run"),
    ("method of a result", "self.a().append(1)", "call:a"),
    ("method of a method's result", "self.a.get().append(1)", "invoke:a.get"),
    ("called element", "self.a[0](1)", "read:a"),
    # Places that bind
    ("tuple", "self.a, (self.b, x) = self.c", "read:c rebind:a rebind:b"),
    ("star in a tuple", "x, *self.a = self.b", "read:b rebind:a"),
    ("swap", "self.a, self.b = self.b, self.a", "read:a read:b rebind:a rebind:b"),
    ("loop target", "for self.a in self.b:\n    self.c += 1\nelse:\n    self.d",
     "read:b rebind:a read:c rebind:c read:d"),
    ("loop element", "for self.a[0] in x:\n    pass", "mutate:a"),
    ("async loop", "async for self.a in self.b():\n    pass", "call:b rebind:a"),
    ("with target", "with self.a as self.b, open(x) as self.c:\n    pass", "read:a rebind:b rebind:c"),
    ("async with", "async with self.a() as self.b:\n    pass", "call:a rebind:b"),
    ("comprehension target", "return [0 for self.a in self.b]", "read:b rebind:a"),
    ("walrus value", "if (n := self.a) > self.b:\n    return n", "read:a read:b"),
    ("exception", "try:\n    self.a()\nexcept self.b as e:\n    self.c = e\nfinally:\n    self.d()",
     "call:a read:b rebind:c call:d"),
    ("match", "match self.a:\n    case self.b:\n        self.c = 1\n    case K(k=self.d) if self.e:\n        pass",
     "read:a read:b rebind:c read:d read:e"),
    ("global name", "global self_\nself_ = self.a", "read:a"),
    # Arguments
    ("star arguments", "f(*self.a, **self.b)", "read:a read:b"),
    ("keyword argument", "f(x=self.a)", "read:a"),
    ("raised, asserted, yielded", "assert self.a, self.b\nyield self.c\nraise self.d from self.e",
     "read:a read:b read:c read:d read:e"),
    ("yield from", "yield from self.a", "read:a"),
    # Aliases of the host
    ("alias", "s = self\ns.a = s.b", "read:b rebind:a"),
    ("alias of an alias", "s = self\nt = s\nt.a.b = 1", "mutate:a"),
    ("alias in a tuple", "s, n = self, 1\ns.a", "read:a"),
    ("alias by a walrus", "(s := self).a = 1\ns.b", "rebind:a read:b"),
    ("alias or another", "s = self if x else y\ns.a = 1", "rebind:a?"),
    ("alias that is bound again", "s = self\ns.a\ns = other()\ns.b", "read:a? read:b?"),
    ("alias bound twice to the same", "if x:\n    s = self\nelse:\n    s = self\ns.a", "read:a"),
    ("self bound again", "self.a\nself = x\nself.b", "read:a? read:b?"),
    ("name that is no alias", "s = self.copy_of\nother.a = 1", "read:copy_of"),
    ("loop variable hides nothing", "for s in (self, x):\n    s.a", "read:a?"),
    # Aliases of what is reached
    ("alias of a value, changed", "q = self.a\nq.append(1)", "read:a mutate:a"),
    ("alias of a part, changed", "q = self.a.b\nq[0] = 1", "read:a mutate:a"),
    ("alias of a value, read", "q = self.a\nreturn q.b", "read:a"),
    ("alias of a value, bound again", "q = self.a\nq = []\nq.append(1)", "read:a mutate:a?"),
    ("alias of a value, augmented", "q = self.a\nq += [1]", "read:a mutate:a?"),
    ("alias of a default", "q = self.a or []\nq.append(1)", "read:a mutate:a?"),
    ("alias of a method", "f = self.a\nf(1)", "read:a call:a"),
    ("alias of one of two", "q = self.a if x else self.b\nq.clear()", "read:a read:b mutate:a? mutate:b?"),
    ("alias of each of two", "for q in (self.a, self.b):\n    q.clear()", "read:a read:b mutate:a? mutate:b?"),
    ("elements are no aliases", "for r in self.a:\n    r.n = 1", "read:a"),
    # Nested scopes
    ("lambda", "return lambda: self.a", "read:a~"),
    ("lambda that calls", "f(key=lambda r: self.a(r) + self.b[r])", "call:a~ read:b~"),
    ("lambda with its own self", "return lambda self: self.a", ""),
    ("lambda with a default", "return lambda s=self: s.a", "read:a~?"),
    ("nested function", "def f():\n    self.a.append(1)\nf()", "mutate:a~"),
    ("nested function's default", "def f(x=self.a):\n    self.b = x", "read:a rebind:b~"),
    ("nested function with its own self", "def f(self):\n    self.a = 1", ""),
    ("nested alias", "s = self\ndef f():\n    s.a = 1", "rebind:a~"),
    ("alias changed by a nested function", "s = self\ndef f():\n    nonlocal s\n    s = other()\ns.a", "read:a?"),
    ("nested class", "o = self\nclass K:\n    x = self.a\n    def f(self):\n        self.b = o.c", "read:a read:c~"),
    ("nested class's own names", "s = x\nclass K:\n    s = self\n    def f(it):\n        s.a\n    b = s.c", "read:c"),
    ("decorator of a nested function", "@self.a\ndef f():\n    pass", "read:a"),
    ("comprehension", "return [self.a + r for r in self.b if self.c]", "read:b read:c read:a"),
    ("comprehension's own name", "return [self.a for self in x]", ""),
    ("dictionary comprehension", "return {self.a: r for r in x for y in self.b}", "read:b read:a"),
    ("walrus inside of a comprehension", "[s for r in x if (s := self)]\ns.a", "read:a"),
    ("generator argument", "return sum(r.n for r in self.a)", "read:a"),
    # Names in strings
    ("getattr", "return getattr(self, 'a')", "read:a"),
    ("getattr with a default, called", "getattr(self, 'a', self.b)()", "call:a read:b"),
    ("getattr, changed", "getattr(self, 'a').b = 1", "mutate:a"),
    ("setattr, hasattr, delattr", "if hasattr(self, 'a'):\n    setattr(self, 'b', 1)\n    delattr(self, 'c')",
     "read:a rebind:b delete:c"),
    ("object.__setattr__", "object.__setattr__(self, 'a', self.b)", "rebind:a read:b"),
    ("a loop over names", "for n in ('a', 'b'):\n    getattr(self, n).clear()", "mutate:a? mutate:b?"),
    ("attrgetter, methodcaller", "attrgetter('a')(self)\noperator.methodcaller('b', 1)(self)", "read:a call:b"),
    ("getattr of another", "return getattr(other, 'a')", ""),
    # Classes
    ("super", "super().a()\nsuper(K, self).b", "call:a read:b"),
    ("the host's class", "type(self).a = 1\nself.__class__.b", "rebind:a read:b"),
    ("unbound method", "Mixin.a(self, self.b)", "call:a read:b"),
    ("unbound method in a partial", "return partial(Mixin.a, self)", "read:a"),
    ("class attribute", "return Mixin.a", "read:a"),
    ("private name", "self.__a = self.__b__", "read:__b__ rebind:_Host__a"),
    ("patched class", "with patch.object(Mixin, 'a'):\n    pass", "rebind:a"),
]  # fmt: skip


def read(code: str, parameters: str = "self") -> AccessReader:
    text = f"async def method({parameters}, other, x, y):\n" + indent(dedent(code), "    ")
    (function,) = ast.parse(text).body
    assert isinstance(function, ast.AsyncFunctionDef)
    reader = AccessReader(
        path="host.py",
        parameters={"self": Origin("host")},
        class_name="Host",
        is_host_class=lambda name: name == "Mixin",
    )
    reader.read(function)
    return reader


def shown(access: Access) -> str:
    member = f".{access.member}" if access.kind == "invoke" else ""
    doubt = "" if access.is_certain else "?"
    return f"{access.kind}:{access.attribute}{member}{'~' if access.is_deferred else ''}{doubt}"


def test_each_use_has_its_kind() -> None:
    found = {case: sorted(shown(access) for access in read(code).accesses) for case, code, _ in FLAT}
    assert found == {case: sorted(expected.split()) for case, _, expected in FLAT}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        pytest.param("getattr(self, x)", "getattr(self, x)", id="a variable"),
        pytest.param("getattr(self, 'get_' + x)()", "getattr(self, 'get_' + x)", id="a sum"),
        pytest.param("setattr(self, f'n_{x}', 1)", "setattr(self, f'n_{x}', 1)", id="a formatted string"),
        pytest.param("self.__dict__.update(x)", "self.__dict__", id="the dictionary"),
        pytest.param("for n in x:\n    getattr(self, n)", "getattr(self, n)", id="a loop over anything"),
        pytest.param("return vars(self)", "vars(self)", id="vars"),
        pytest.param("n = 'a'\nn = y\ngetattr(self, n)", "getattr(self, n)", id="a name with two bindings"),
    ],
)
def test_an_unknown_name_is_said_as_unknown(code: str, expected: str) -> None:
    reader = read(code)
    assert [each.text for each in reader.indirect] == [expected]
    assert reader.accesses == []


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        pytest.param("f(self)", ["argument f 0"], id="placed"),
        pytest.param("m.f(1, scheduler=self)", ["argument m.f scheduler"], id="named"),
        pytest.param("f(self.a)(self)", ["argument ... 0"], id="a computed function"),
        pytest.param("return self", ["returned  "], id="returned"),
        pytest.param("yield self", ["returned  "], id="yielded"),
        pytest.param("other.host = self", ["stored  "], id="stored in an attribute"),
        pytest.param("x[0] = [self]", ["stored  "], id="stored in a list"),
        pytest.param("return {'host': self}", ["stored  "], id="stored in a dictionary"),
        pytest.param("return lambda: self", ["returned  "], id="returned by a lambda"),
        pytest.param("s = self\nf(s, *[s])", ["argument f 0", "stored  "], id="an alias"),
        pytest.param("isinstance(self, x) or id(self) or type(self)", [], id="only looked at"),
        pytest.param("s = self", [], id="an alias alone"),
        pytest.param("Mixin.a(self)", [], id="an unbound method"),
    ],
)
def test_a_bare_host_that_leaves_is_listed(code: str, expected: list[str]) -> None:
    assert [f"{each.how} {each.callee} {each.parameter}" for each in read(code).escapes] == expected


def test_a_use_says_where_and_how_it_reaches_the_host() -> None:
    reader = read("(self\n .a\n .b.run())\ns = self\nif s.c:\n    getattr(s, 'd')")
    found = [(each.line, each.column, each.attribute, each.via, each.is_conditional) for each in reader.accesses]
    assert found == [(3, 6, "a", "self", False), (6, 9, "c", "alias", False), (7, 8, "d", "getattr", True)]
