"""Communication of all methods: transports, averages, agreement between workers. Only `transport` sends messages by
torch.distributed, except for `fsdp`; `in_process_group` stands in for torch.distributed among threads.

Public: `pipeline_replicas`; all else serves the strategies.
"""
