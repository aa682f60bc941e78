"""Plans of a token pipeline as values, without torch: schedules, slices, stages, their costs and forecasts.

Public: `schedule`, `slicing`, `partition` and `forecast`; `cost` and `dynamic_program` serve those."""
