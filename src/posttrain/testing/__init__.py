"""Contract suites for parts of your own: a store, a data step, a selector, a score, a scorer, an objective, a stage, a
merge method, and the sampler, the scheduler and the backend of a study."""
