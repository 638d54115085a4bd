"""The reference engine: composes every part of the kit. Nothing imports this room."""
