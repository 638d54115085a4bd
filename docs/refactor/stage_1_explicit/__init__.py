"""Step 1: facts are passed in, and sockets are opened before the scheduler is made. Nothing is ambient any more."""
