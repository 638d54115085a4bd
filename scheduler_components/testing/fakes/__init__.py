"""Hand-written fakes of every port. None of them sleeps, reads a clock or takes a fixed port."""
