"""The reference engine: a front and lockstep scheduler processes, composed of every part of the kit."""
