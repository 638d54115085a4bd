"""Refactor a scheduler of mixins into components: measure what its methods use, and move them as a recipe says."""

from scheduler_components.refactor.recipe import Recipe, read_recipe, write_recipe

__all__ = ["Recipe", "read_recipe", "write_recipe"]
