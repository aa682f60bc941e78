"""The subcommands of `lightning-decentral`, one a module: `add(commands)` describes it to argparse."""
