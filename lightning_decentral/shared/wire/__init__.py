"""Communication of all methods: transports, averages, agreement between workers. Only `transport` (and `fsdp`) calls
torch.distributed to send; `in_process_group` stands in for torch.distributed among threads.

Public: `pipeline_replicas`; all else serves the strategies."""
