# Sourced by run: steps, lanes of them beside each other, and what became of all.
#
# A lane is a function that runs steps one after the other. The log of one of several lanes is printed
# whole, when it and those listed before it have ended. An interrupt ends every lane.

scratch=$(mktemp -d) || exit 1
outcomes=$scratch/outcomes
groups=() # process groups of the lanes that run
grace=10  # seconds that an interrupt leaves them to clean up

signal_lanes() { # signal_lanes SIGNAL: whether one of them still runs
    local group status=1
    for group in "${groups[@]}"; do
        kill "-$1" -- "-$group" 2>/dev/null && status=0
    done
    return "$status"
}

interrupted() { # interrupted STATUS
    local end=$((SECONDS + grace))
    trap '' INT TERM HUP
    signal_lanes INT
    while [ "$SECONDS" -lt "$end" ] && signal_lanes 0; do sleep 0.1; done
    signal_lanes KILL
    printf '\ninterrupted after %d s\n' "$SECONDS" >&2
    exit "$1"
}

trap 'rm -rf "$scratch"' EXIT
trap 'interrupted 130' INT
trap 'interrupted 143' TERM HUP

step() { # step NAME COMMAND...
    local name=$1 start=$SECONDS status result=ok
    shift
    printf '\n=== %s: %s\n' "$name" "$*"
    "$@"
    status=$?
    [ "$status" -eq 0 ] || result=FAILED name="$name (status $status)"
    printf '%-7s %5d s  %s\n' "$result" $((SECONDS - start)) "$name" | tee -a "$outcomes"
    return "$status"
}

lanes() { # lanes FUNCTION...
    local lane
    groups=()
    set -m # each lane is a process group: a signal reaches all that it started
    for lane in "$@"; do
        (
            trap 'exit 130' INT
            outcomes=$scratch/$lane.outcomes
            : >"$outcomes"
            [ "$#" -eq 1 ] || exec >"$scratch/$lane.log" 2>&1
            "$lane"
            exit 0
        ) &
        groups+=("$!")
    done
    set +m
    for lane in "$@"; do
        wait "${groups[0]}" || printf 'FAILED      ? s  lane %s (status %d)\n' "$lane" $? >>"$outcomes"
        groups=("${groups[@]:1}")
        [ "$#" -eq 1 ] || cat "$scratch/$lane.log"
        cat "$scratch/$lane.outcomes" >>"$outcomes"
    done
}

claim() { # claim NAME: whether no lane has claimed it before
    mkdir "$scratch/claimed $1" 2>/dev/null
}

have_passed() { # whether no step so far failed
    ! grep -q '^FAILED' "$outcomes"
}

summary() { # summary LINE...
    printf '\n=== summary\n'
    cat "$outcomes"
    [ "$#" -eq 0 ] || printf '%s\n' "$@"
    if have_passed; then
        printf '\nall %d steps passed in %d s\n' "$(wc -l <"$outcomes")" "$SECONDS"
        exit 0
    fi
    printf '\nFAILED after %d s, in: %s\n' "$SECONDS" \
        "$(sed -n 's/^FAILED.\{11\}//p' "$outcomes" | paste -sd, | sed 's/,/, /g')"
    exit 1
}
