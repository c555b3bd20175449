# PID 1 of a sandbox whose image has no Python: the protocol of runner.py in bash 4 and coreutils.
#
# It does the same more slowly (a few processes a command), with these differences: it cannot close itself to the
# processes of a command (`ready, 0`), times are exact to 10 ms, and a command's input is a file, not a pipe.
#
# A command writes to a pipe of its own, and `cat` carries it to a file. When the command has ended, every process is
# stopped at once, so that none can start another, and all but `cat` are killed: with the last writer gone `cat` reads to
# the end of the pipe and ends too. Nothing that was written is lost, and nobody lives on. Files and pipes lose their
# names as soon as they are open, so that a command that empties the folder does no harm.

[ $$ = 1 ] || { echo "shell runner: not PID 1, and its kill -1 would reach processes that are not its own" >&2; exit 1; }

# Those for which bash has handlers, which make them reach even PID 1.
trap '' HUP INT QUIT ILL TRAP ABRT BUS FPE USR1 SEGV SYS PIPE ALRM TERM XCPU XFSZ VTALRM PROF USR2
own_locale=${LC_ALL-}
own_locale_set=${LC_ALL+set}
LC_ALL=C # characters are bytes
flood=$((256 << 20))
dir=/var/tmp/agent-r3-runner
setsid=$(type -P setsid)

# 4/5: a command's output, 6/7: its report (read and write end); 8: a pipe in which nothing ever comes, to sleep on;
# 9, 10, 11: files with the output, the report, and what came for a command or a file; 12: for a moment.
mkdir -p "$dir" && chmod 700 "$dir" && mkfifo "$dir/never" || exit 1
exec 8<>"$dir/never"
rm -f "$dir/never"

new_file() { # empty and nameless, at the descriptor $1
    [ -d "$dir" ] || mkdir -p "$dir" || exit 1
    rm -rf "$dir/file"
    : >"$dir/file" || exit 1
    eval "exec $1<>\"$dir/file\""
    rm -f "$dir/file"
}

new_pipe() { # nameless, read end at the descriptor $1, write end at $2
    [ -d "$dir" ] || mkdir -p "$dir" || exit 1
    rm -rf "$dir/pipe"
    mkfifo "$dir/pipe" || exit 1
    # Opened at both ends first: opening one end of a pipe waits for the other.
    eval "exec 12<>\"$dir/pipe\" $1<\"$dir/pipe\" $2>\"$dir/pipe\" 12>&-"
    rm -f "$dir/pipe"
}

size_of() { # descriptor -> size
    size=$(stat -L -c %s "/proc/1/fd/$1") || exit 1
}

nap() { read -r -t "$1" -u 8; }

uptime_ms() { # -> now
    read -r now _ </proc/uptime
    now=$((10#${now/./} * 10))
}

# --- messages

read_byte() { # -> byte; ends the sandbox when the host has gone
    local tries
    for tries in 1 2 3 4 5; do # a child's death can make a read fail as the end of the input does
        if IFS= read -r -d '' -n 1 byte; then
            value_of_byte
            return
        fi
        nap 0.002
    done
    exit 0
}

value_of_byte() {
    if [ -n "$byte" ]; then
        printf -v byte %d "'$byte"
        byte=$((byte & 255))
    else
        byte=0
    fi
}

read_number() { # -> number
    number=0
    for _ in 1 2 3 4; do
        read_byte
        number=$(((number << 8) + byte))
    done
}

read_text() { # of `number` bytes -> text; without its NULs, which nul tells of
    local part left=$number
    text=''
    nul=''
    while ((left)); do
        IFS= read -r -d '' -n "$left" part || exit 0 # ends early at a NUL
        text+=$part
        ((left -= ${#part}))
        if ((left)); then
            nul=1
            ((left -= 1))
        fi
    done
}

read_data() { # of `number` bytes -> descriptor 11
    new_file 11
    if ((number >> 20)); then dd bs=1M count=$((number >> 20)) iflag=fullblock >&11; fi
    if ((number & 0xfffff)); then dd bs=$((number & 0xfffff)) count=1 iflag=fullblock >&11; fi
}

read_message() {
    read_number
    read_fields
}

read_fields() { # `number` of them -> fields[], nuls[]; the one that may be binary is at descriptor 11
    local count=$number i
    fields=() nuls=()
    for ((i = 0; i < count; i++)); do
        read_number
        case ${fields[0]}$i in
            run5 | put3) read_data ;;
            *) read_text ;;
        esac
        fields[i]=$text
        nuls[i]=$nul
    done
}

send_number() {
    local hex
    printf -v hex '\\x%02x\\x%02x\\x%02x\\x%02x' $(($1 >> 24 & 255)) $(($1 >> 16 & 255)) $(($1 >> 8 & 255)) $(($1 & 255))
    printf "$hex"
}

send() { # all fields are text
    local field
    send_number $#
    for field; do
        send_number ${#field}
        printf %s "$field"
    done
}

send_bytes() { # head or tail, number of bytes, descriptor
    send_number "$2"
    (($2 == 0)) || "$1" -c "$2" "/proc/1/fd/$3"
}

# --- a command

start_command() { # -> pid
    (
        exec 4<&- 6<&- 8<&- 9<&- 10<&- 11<&-
        trap - HUP INT QUIT ILL TRAP ABRT BUS FPE USR1 SEGV SYS PIPE ALRM TERM XCPU XFSZ VTALRM PROF USR2
        echo 1000 >/proc/self/oom_score_adj # the kernel should take the command, not PID 1
        if ! cd -- "$cwd"; then
            echo "cannot run the command: no folder $cwd" >&5
            exit 127
        fi
        unset OLDPWD
        if [ -n "$own_locale_set" ]; then LC_ALL=$own_locale; else unset LC_ALL; fi
        if ((report_cap)); then exec 3>&7; else exec 3>&-; fi
        exec 7>&- 1>&5 2>&5 5>&-
        exec $setsid bash -c "$command"
    ) </proc/1/fd/11 &
    pid=$!
}

start_collectors() { # -> collectors[]
    new_file 9
    new_file 10
    new_pipe 4 5
    cat <&4 >&9 4<&- 5>&- 8<&- 9<&- 10<&- 11<&- &
    collectors=($!)
    exec 4<&-
    if ((report_cap)); then
        new_pipe 6 7
        cat <&6 >&10 5>&- 6<&- 7>&- 8<&- 9<&- 10<&- 11<&- &
        collectors+=($!)
        exec 6<&-
    fi
}

too_much() {
    local position
    read -r _ position <"/proc/${collectors[0]}/fdinfo/1" && ((position > flood))
}

watch() { # -> why
    local wait=2 pause status
    why=
    while kill -0 "$pid"; do
        uptime_ms
        if ((now >= deadline)); then why=timeout; return; fi
        if too_much; then why=flood; return; fi
        printf -v pause 0.%03d $wait
        IFS= read -r -d '' -n 1 -t "$pause" byte
        status=$?
        if ((status == 0)); then
            value_of_byte
        elif ((status == 1)) && read -t 0; then # there is input, or its end
            read_byte
            status=0
        fi
        if ((status == 0)); then
            number=$byte
            for _ in 1 2 3; do
                read_byte
                number=$(((number << 8) + byte))
            done
            read_fields
            if [ "${fields[0]}" = stop ]; then why=stopped; return; fi
        fi
        ((wait = wait < 25 ? 2 * wait : 50))
    done
}

end_all() {
    local process others
    kill -STOP -1
    while :; do
        others=()
        for process in /proc/[0-9]*; do
            process=${process#/proc/}
            case " 1 ${collectors[*]} " in
                *" $process "*) ;;
                *) others+=("$process") ;;
            esac
        done
        ((${#others[@]})) || break
        kill -KILL "${others[@]}"
        nap 0.002
    done
    kill -CONT "${collectors[@]}"
    wait "${collectors[@]}"
    while :; do # one that has taken the number of a `cat` that the command killed
        kill -KILL -1
        others=(/proc/[0-9]*)
        ((${#others[@]} > 1)) || break
        nap 0.002
    done
}

run() {
    local command=${fields[1]} cwd=${fields[2]} cap=${fields[4]} report_cap=${fields[6]} began code total half
    if [ -n "${nuls[1]}" ]; then command='echo "cannot run the command: embedded null byte"; exit 126'; fi
    uptime_ms
    began=$now
    deadline=$((began + fields[3]))
    start_collectors
    start_command
    exec 5>&- 7>&-
    watch
    end_all
    wait "$pid"
    code=$?
    wait
    uptime_ms
    size_of 9
    total=$size
    half=$((cap / 2 > 1 ? cap / 2 : 1))
    size_of 10
    send_number 8
    send_number 4
    printf 'done'
    send_bytes head $((total < half ? total : half)) 9
    send_bytes tail $((total <= half ? 0 : total - half < half ? total - half : half)) 9
    for field in "$total" "$code" "$why" $(((now - began) * 1000)); do
        send_number ${#field}
        printf %s "$field"
    done
    send_bytes head $((size > report_cap ? report_cap + (report_cap > 0) : size)) 10
    exec 9<&- 10<&- 11<&-
}

# --- files

put() {
    local path=${fields[1]} mode
    printf -v mode %o "${fields[2]}"
    if [ -n "${nuls[1]}" ]; then send oserror 22 "embedded null byte"; return; fi
    if [ -d "$path" ]; then send oserror 21 "Is a directory"; return; fi
    if [ -e "$path" ] && [ ! -f "$path" ]; then send oserror 22 "not a regular file"; return; fi
    mkdir -p -- "$(dirname -- "$path")" || { send oserror 20 "Not a directory"; return; }
    if [ ! -e "$path" ]; then
        (umask 077 && : >"$path") && chmod "$mode" -- "$path" || { send oserror 13 "Permission denied"; return; }
    elif [ ! -w "$path" ]; then
        send oserror 13 "Permission denied"
        return
    fi
    cat /proc/1/fd/11 >"$path" || { send oserror 28 "cannot be written in full"; return; }
    exec 11<&-
    send 'done'
}

get() {
    local path=${fields[1]} largest=${fields[2]}
    if [ -n "${nuls[1]}" ]; then send oserror 22 "embedded null byte"; return; fi
    if [ ! -e "$path" ]; then send missing "No such file or directory"; return; fi
    if [ ! -f "$path" ]; then send missing "not a regular file"; return; fi
    new_file 11
    head -c $((largest + 1)) -- "$path" >&11 || { send oserror 13 "Permission denied"; return; }
    size_of 11
    if ((size > largest)); then
        send oserror 27 "larger than $largest bytes"
    else
        send_number 2
        send_number 4
        printf 'done'
        send_bytes head "$size" 11
    fi
    exec 11<&-
}

[ -s /etc/hosts ] || printf '127.0.0.1 localhost\n::1 localhost\n127.0.1.1 %s\n' "$HOSTNAME" >/etc/hosts
exec 2>/dev/null # bash tells there of every process that is killed
send ready 0
while :; do
    read_message
    case ${fields[0]} in
        run) run ;;
        put) put ;;
        get) get ;;
        stop) ;;
        *) exit 1 ;;
    esac
done
