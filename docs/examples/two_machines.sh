#!/bin/sh
# Two machines at home, over a slow link and a tunnel (docs/examples.md says how to dig it).
#   sh docs/examples/two_machines.sh 0      on the machine that is 10.8.0.1 in the tunnel
#   sh docs/examples/two_machines.sh 1      on the other one
# Behind the number: the first machine's address, the interface, and words for hosts.py.
set -e
export NODE_RANK="$1" MASTER_ADDR="${2:-10.8.0.1}" GLOO_SOCKET_IFNAME="${3:-wg0}" MASTER_PORT="${MASTER_PORT:-29500}"
[ $# -gt 3 ] && shift 3 || shift $#
exec python "$(dirname "$0")/hosts.py" --nodes=2 --devices=1 --slow "$@"
