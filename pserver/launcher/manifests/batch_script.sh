
set -euo pipefail
unset PSERVER_KEYS PSERVER_TOKEN_FILE PSERVER_METRICS # of who has submitted the job
umask 077 # nobody else reads the token files
logs=logs/$SLURM_JOB_ID
mkdir -p "$logs"

# slots SUFFIX: the host of each task of the allocation, or of one part of it, a line each.  Hosts take
# turns, so that servers are on different ones.
slots() {
    local nodes=SLURM_JOB_NODELIST$1 tasks=SLURM_TASKS_PER_NODE$1 host part i round=0 found=1
    local -a hosts parts counts=()
    mapfile -t hosts < <(scontrol show hostnames "${!nodes}")
    IFS=, read -ra parts <<< "${!tasks}" # 4(x2),3: two hosts with 4 tasks, one with 3
    for part in "${parts[@]}"; do
        local times=1
        if [[ $part == *x* ]]; then times=${part#*x} times=${times%)}; fi
        for ((i = 0; i < times; i++)); do counts+=("${part%(*}"); done
    done
    while ((found)); do
        found=0
        for i in "${!hosts[@]}"; do
            if ((counts[i] > round)); then echo "${hosts[i]}" && found=1; fi
        done
        round=$((round + 1))
    done
}

server_step=() trainer_step=()
if [[ -n ${SLURM_HET_SIZE:-} ]]; then
    slots _HET_GROUP_0 > "$logs/server-hosts"
    slots _HET_GROUP_1 > "$logs/trainer-hosts"
    server_step=(--het-group=0) trainer_step=(--het-group=1)
else
    slots "" > "$logs/hosts"
    head -n "$servers" "$logs/hosts" > "$logs/server-hosts"
    tail -n "$trainers" "$logs/hosts" > "$logs/trainer-hosts"
fi
mapfile -t server_hosts < "$logs/server-hosts"
if [[ -z $keys ]]; then
    # a secret of the job's own, in files that only this user can read
    python - "$logs" << 'END'
import sys
from pathlib import Path

from pserver.security.tokens import Role, Secret, write

secret = Secret.make()
for role in (Role.OPERATOR, Role.TRAINER):
    write(Path(sys.argv[1]) / f"{role.word}.token", secret.of(role))
END
    if [[ -z $PSERVER_INSECURE ]]; then server_hosts=("${server_hosts[@]/*/127.0.0.1}"); fi
fi

# Jobs that follow one another have different ports, below those that the system hands out itself.
first_port=$((20000 + SLURM_JOB_ID * servers % 12000))
endpoints=()
for i in "${!server_hosts[@]}"; do endpoints+=("${server_hosts[i]}:$((first_port + i))"); done
PSERVER_ENDPOINTS=$(IFS=, && echo "${endpoints[*]}")
export PSERVER_ENDPOINTS TRAINERS=$trainers PSERVER_JOB=$SLURM_JOB_NAME
export PSERVER_START_TIMEOUT=$start_timeout OMP_NUM_THREADS=$cpus

# protect ROLE: the keys of this host, or the role's token file.
protect() {
    if [[ -n $keys ]]; then
        export PSERVER_KEYS=$keys/$SLURMD_NODENAME
    else
        export PSERVER_TOKEN_FILE=$PWD/$logs/$1.token
    fi
}

# What a task of the servers' step runs.
serve() {
    local more=(--once) endpoint
    IFS=, read -ra endpoints <<< "$PSERVER_ENDPOINTS"
    endpoint=${endpoints[SLURM_PROCID]}
    if [[ -n $data_dir ]]; then more+=(--data-dir "$data_dir"); fi
    if ((metrics)); then more+=(--metrics "${endpoint%:*}:$((metrics + SLURM_PROCID))"); fi
    protect operator
    exec pserver serve --endpoint "$endpoint" "${more[@]}"
}

# What a task of the trainers' step runs.
train() {
    export TRAINING_ROLE=TRAINER TRAINER_ID=$SLURM_PROCID
    if ((metrics)); then
        local host=127.0.0.1
        if [[ -n $keys || -n $PSERVER_INSECURE ]]; then host=$SLURMD_NODENAME; fi
        export PSERVER_METRICS=$host:$((metrics + servers + SLURM_PROCID))
    fi
    protect trainer
    exec "$@"
}
export -f protect serve train
export logs keys data_dir metrics servers

# step ROLE COUNT OPTION... COMMAND...: a step of the job, with a log for each of its processes.
step() {
    local role=$1 count=$2
    shift 2
    SLURM_HOSTFILE=$logs/$role-hosts srun --distribution=arbitrary --ntasks="$count" \
        --nodes="$(sort -u "$logs/$role-hosts" | wc -l)" --cpus-per-task="$cpus" --exact \
        --output="$logs/$role-%t.log" --open-mode=append "$@"
}

# SIGTERM, which Slurm sends before the time is up, ends trainers and servers in good order.
terminate() { scancel --signal=TERM "$SLURM_JOB_ID" 2> /dev/null || true; }
told=
trap 'told=1; terminate' TERM INT

# run: the job, once; sets status.
run() {
    local serving training deadline
    step server "$servers" "${server_options[@]}" "${server_step[@]}" bash -c serve &
    serving=$!
    deadline=$((SECONDS + start_timeout))
    until (protect trainer && exec pserver status --ready "$PSERVER_ENDPOINTS") > "$logs/ready.log" 2>&1; do
        if ! kill -0 "$serving" 2> /dev/null || ((SECONDS > deadline)); then
            echo "the servers are not ready: see $PWD/$logs" >&2
            terminate
            wait "$serving" || true
            status=1
            return
        fi
        sleep 1
    done
    step trainer "$trainers" "${trainer_options[@]}" "${trainer_step[@]}" bash -c 'train "$@"' train "${script[@]}" &
    training=$!
    status=0
    wait "$training" || status=$?
    while kill -0 "$training" 2> /dev/null; do # a signal ends `wait`, not the trainers
        status=0
        wait "$training" || status=$?
    done
    terminate # servers that have had no job; the others end by themselves
    wait "$serving" || true
}

run
for ((restart = 1; restart <= restarts && status; restart++)); do
    if [[ -n $told ]]; then break; fi
    echo "status $status; starts the job again (restart $restart of $restarts)" >&2
    run
done
if [[ -z $keys ]]; then rm -f "$logs"/*.token; fi
exit "$status"
