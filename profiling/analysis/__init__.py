"""From a profiler's capture to figures: one table, one analysis, for nsys and Kineto alike.

Needs numpy and the standard library only, so that a capture can be read where torch is not.
In the order of the work: `sources` finds the captures, `nsys` and `kineto` read them into the
`table`, `steps` finds the steps, `attribution` names the range that made each kernel, `budget`
divides the time of the steps, `summary` puts everything into one mapping, report.json.
"""
