#!/bin/bash
# An epilog for slurm.conf (Epilog=/path/to/epilog.sh): removes published weights that killed workers left on this node.
# Arguments: the directories to look in (default: /dev/shm; `cluster.weights_dir` of a run may be another).
#
# Every process that uses a run's weights in NAME holds a lock on NAME.lock: each `stageline worker`, and a local run's
# driver. If that file can be locked here, no such process lives on this node. Weights that are locked belong to another
# job and stay, and so do weights without such a file.
set -u

# Slurm runs epilogs as root. Everything below is done as the job's user, who can then harm nobody else by a file's name.
if [ "$(id -u)" = 0 ] && [ "${SLURM_JOB_UID:-0}" != 0 ]; then
    exec timeout 60 setpriv --reuid="$SLURM_JOB_UID" --regid="$(id -g "$SLURM_JOB_UID")" --init-groups "$0" "$@"
fi
for folder in "${@:-/dev/shm}"; do
    for lock in "$folder"/stageline-*.lock; do
        [ -f "$lock" ] && [ -O "$lock" ] || continue
        (
            flock --exclusive --nonblock 9 || exit 0
            [ "$lock" -ef /dev/fd/9 ] || exit 0    # its last worker has just removed it, and another run's may be there
            rm -rf "${lock%.lock}" "$lock"   # the lock last: who waits for it then finds that it is gone
        ) 9<"$lock"
    done
done
exit 0                      # Slurm drains a node whose epilog fails
