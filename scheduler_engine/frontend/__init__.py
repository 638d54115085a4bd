"""The process that serves HTTP, dispatches requests and reads every rank's reports."""
