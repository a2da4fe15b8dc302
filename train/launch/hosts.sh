#!/bin/bash
# Training over ssh, one process per host: train/launch/hosts.sh "node0 node1" --config CONFIG --out RUN [name=value …]
# Runs in the current folder on every host, which all must share. A signal here goes to every process; when one
# ends with an error, the others are ended too. SSH names another way to reach a host, COORDINATOR_PORT a port.
set -u
[ $# -ge 2 ] || { echo "usage: $0 \"HOST …\" [options of laneformer train]" >&2; exit 2; }
read -ra hosts <<<"$1"
shift
port=${COORDINATOR_PORT:-7070}
options=$(printf '%q ' "$@")

pids=()
for i in "${!hosts[@]}"; do
    # The remote shell becomes the process: its pid is what a signal has to reach.
    ${SSH:-ssh -o BatchMode=yes} "${hosts[i]}" "cd $(printf %q "$PWD") && echo \$\$ >.laneformer-$port-$i.pid \
        && exec laneformer train --coordinator ${hosts[0]}:$port --num-processes ${#hosts[@]} --process-id $i $options" &
    pids+=($!)
done

everywhere() {
    for i in "${!hosts[@]}"; do
        ${SSH:-ssh -o BatchMode=yes} "${hosts[i]}" "kill -$1 \$(cat $(printf %q "$PWD")/.laneformer-$port-$i.pid)" 2>/dev/null
    done
}
trap 'everywhere TERM' TERM INT
trap 'everywhere USR1' USR1

code=0
declare -A running
for pid in "${pids[@]}"; do running[$pid]=1; done
while [ ${#running[@]} -gt 0 ]; do
    ended=
    wait -n -p ended "${!running[@]}"
    status=$?
    [ -n "${ended:-}" ] || continue # a signal ended the wait
    unset "running[$ended]"
    [ "$status" -gt "$code" ] && code=$status
    case $status in
        0 | 130 | 138 | 143) ;; # done, or saved after a signal
        *) everywhere KILL ;;
    esac
done
for i in "${!hosts[@]}"; do
    ${SSH:-ssh -o BatchMode=yes} "${hosts[i]}" "rm -f $(printf %q "$PWD")/.laneformer-$port-$i.pid"
done
exit "$code"
