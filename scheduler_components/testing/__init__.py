"""The test kit: strategies, fakes, models, machines, golden bytes and checks that your own parts can be held to.

Nothing is imported here; take what you need from its module. Only ``strategies`` and ``machines`` need Hypothesis
(the extra ``testing``); everything else runs with what the kit itself installs, and nothing needs pytest.

- ``*_checks``: plain functions over a part of yours; each raises ``trace.ConformanceError`` with what was done, what
  was expected and what came. ``parts`` lists what each check asks of the part.
- ``conformance``: the judge of a live engine's stream, behind ``scheduler-components conformance``.
- ``ledger``, ``wire_rules``: what a stream's events add up to, and every rule that they can break.
- ``golden``: bytes of every dialect and peer, with their reader.
- ``fakes``: clock, sinks, sources, device, ranks, network and a publisher with every fault as an attribute.
- ``machines``: Hypothesis state machines to subclass; ``prefix_cache_model`` is the model behind one.
- ``strategies``: topologies, endpoints, configs, event histories, workloads, network faults.
"""
