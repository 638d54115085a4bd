"""The reference engine: a frontend and lockstep scheduler processes, composed of every part of the kit."""
