"""A faulty network around the cores of the event stream, for tests: of this kit's subscriber and of your own."""
