"""Policies compared in virtual time: the runs, plots and tables of ``docs/explanation/policies.md``::

    python -m benchmarks.studies.policies conversation_trace.jsonl

The results follow from the trace and the code alone, so a second run writes the same files.
"""
