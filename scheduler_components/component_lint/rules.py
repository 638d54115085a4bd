"""What the checker looks for: one table of rules, each with the hint that it proposes."""

from __future__ import annotations

import attrs
import msgspec

from scheduler_components.errors import ConfigError

__all__ = ["RULES", "LintOptions", "Rule"]


class Rule(msgspec.Struct, frozen=True):
    """One smell.

    Attributes:
        id: how findings and suppressions name it.
        smell: what is looked for.
        hint: what to do instead.
    """

    id: str
    smell: str
    hint: str


_TABLE = (
    Rule(
        "whole-scheduler",
        "a field or a method's parameter that holds the whole scheduler, or a use of self.scheduler",
        "ask for a small port with the members that are really read",
    ),
    Rule(
        "mixin",
        "a mixin class, a class made of mixins, or a method whose self is annotated as another class",
        "make it a component of its own that is given what it reads",
    ),
    Rule(
        "too-many-fields",
        "a component with more fields than fit in one head (7, an option)",
        "split it by subject, or group values that travel together",
    ),
    Rule(
        "untyped-callable",
        "a field that is a Callable without its parameter types",
        "ask for a port with a named method; a bare callable only for one typed, stateless verb such as a clock",
    ),
    Rule(
        "many-callables",
        "more typed callables in one class than a clock and one other verb (2, an option)",
        "gather what they read in one port, so that no page of lambdas wires it",
    ),
    Rule(
        "any-field",
        "a field of a component typed Any",
        "name the type, or a Protocol with the members that are used",
    ),
    Rule(
        "ambient-context",
        "a value taken from the surroundings: a global get_...(), a singleton, a global statement, the environment",
        "pass the value in where the component is composed",
    ),
    Rule(
        "io-in-constructor",
        "a socket, thread, process or file opened while an object is constructed",
        "store in the constructor, and open in an open_...() function that hands the resource in",
    ),
    Rule(
        "enabled-gate",
        "a branch on self.enable..., self.enabled or the like",
        "decide once where it is composed, and give a null object where the feature is off",
    ),
    Rule(
        "bad-suppression",
        "a suppression without a reason, or of a rule that there is not",
        "write: # component-lint: ignore[rule] the reason",
    ),
    Rule(
        "unused-suppression",
        "a suppression of what is not there (any more)",
        "delete the comment",
    ),
    Rule(
        "not-python",
        "a file that does not parse",
        "give files of this Python's syntax in UTF-8",
    ),
)

RULES = {rule.id: rule for rule in _TABLE}
"""Every rule by its id, in the order of the documentation."""


def _check_limit(_: LintOptions, attribute: attrs.Attribute[int], value: int) -> None:
    if type(value) is not int or value < 0:
        raise ConfigError(attribute.name, value, "is not a limit", "give an integer of at least 0")


@attrs.frozen(kw_only=True)
class LintOptions:
    """Limits of the rules that count.

    Attributes:
        max_fields: collaborators and settings that a component may ask for; its own state does not count.
        max_callables: typed callables among them.

    Raises:
        ConfigError: a limit is not an integer of at least 0.
    """

    max_fields: int = attrs.field(default=7, validator=_check_limit)
    max_callables: int = attrs.field(default=2, validator=_check_limit)
