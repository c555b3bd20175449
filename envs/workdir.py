"""The bash scripts that ready a repository for the agent and take its change out again.

The change is measured with a git folder of our own beside the repository, so that nothing the agent or the repository
configures takes part: no index, hooks, filters, attributes, drivers or line-ending conversion of theirs. It has all
its objects itself; a folder without git works too.
"""

import shlex

from agent_r3.envs.one_commit import CONFIG, FUNCTIONS, STATE
from agent_r3.types import Source, Task

UNUSABLE = 90  # exit code of SET_UP for an image that lacks what every image must have; the output says what
BUG_PATCH = f"{STATE}/bug.patch"  # where set-up expects `Task.bug_patch`
PATCH = f"{STATE}/patch"  # where `apply` expects the patch

_LARGEST = "16M"  # untracked files above this are cores, dumps and datasets, not a change to source
_CONDA = "/opt/miniconda3"

_GIT_ENVIRONMENT = f"""
git_dir={STATE}/base.git
ours() {{
    GIT_DIR=$git_dir GIT_WORK_TREE=$PWD GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null HOME=/nonexistent \\
        XDG_CONFIG_HOME=/nonexistent git "$@"
}}
"""

# The attributes make git take every file as the bytes it is, in a folder whose branch is `base`.
_NEW_GIT_DIR = f"""
new_git_dir() {{
    mkdir -p "$1/objects/info" "$1/objects/pack" "$1/refs/heads" "$1/info"
    echo "ref: refs/heads/$2" >"$1/HEAD"
    printf %s {shlex.quote(CONFIG)} >"$1/config"
    [ "$2" != base ] || echo '* -text !eol -filter -ident -working-tree-encoding !diff' >"$1/info/attributes"
}}
"""

# For scripts that call `ours apply` on a repository whose own git has no say.
OWN_GIT = f"""{_NEW_GIT_DIR}{_GIT_ENVIRONMENT}
new_git_dir "$git_dir" base
"""

_START = f"""set -eu
unusable() {{ echo "$1"; exit {UNUSABLE}; }}
mkdir -p {STATE} 2>/dev/null || unusable "its user ($(id -un)) cannot write to {STATE}"
exec 2>{STATE}/set-up.log
trap 'status=$?; [ $status = 0 ] || [ $status = {UNUSABLE} ] || tail -c 2000 {STATE}/set-up.log' EXIT
command -v git >/dev/null || unusable "it has no git"
"""

# Compiled test modules and pytest's cache tell what the hidden tests expect; git folders below the repository's own
# hold a history too. Those of the environment in .venv stay: without them every command would compile.
_REMOVE_TESTS = """
removed() { rm -rf -- "$@" || unusable "its user ($(id -un)) cannot remove the hidden tests ($*)"; }
removed /r2e_tests ./r2e_tests /run_tests.sh /eval.sh ${test_files[@]+"${test_files[@]}"}
places=(.)
[ ! -d .venv/src ] || places+=(.venv/src)  # where pip clones what it installs in place
find "${places[@]}" -mindepth 1 \\( -path ./.git -o -path ./.venv \\) -prune \\
    -o \\( -name .git -o -name .pytest_cache -o -name __pycache__ \\) -prune -exec rm -rf {} + || unusable \\
    "its user ($(id -un)) cannot remove caches and git folders below $PWD"
"""

# Without an identity `git commit` refuses; without safe.directory git refuses a folder of another owner.
_HOME = """
for file in ~/.gitconfig ~/.config/git/config /etc/gitconfig; do
    [ -f "$file" ] || continue
    git config --file "$file" --name-only --get-regexp '^(credential|url|http|include|includeif)\\.' | sort -u |
        while IFS= read -r key; do git config --file "$file" --unset-all "$key" || true; done
done
for file in ~/.git-credentials ~/.netrc ~/.config/git/credentials ~/.cache/pip; do
    [ ! -e "$file" ] || rm -rf "$file" || true
done
if [ ! -e ~/.gitconfig ]; then
    printf '%s\\n' '[user]' 'name = agent' 'email = agent@localhost' '[safe]' 'directory = *' >~/.gitconfig || true
else
    git config --global user.name >/dev/null || git config --global user.name agent || true
    git config --global user.email >/dev/null || git config --global user.email agent@localhost || true
    git config --global safe.directory '*' || true
fi
"""

# Prints the tree of all that lies in the workdir.
_SNAPSHOT = """
snapshot() {
    new_git_dir "$git_dir" base
    [ ! -f .git/index ] || cp -p .git/index "$git_dir/index"  # it saves hashing the tree
    [ ! -f .git/info/exclude ] || printf '%s\\n' "$(<.git/info/exclude)" >"$git_dir/info/exclude"
    printf '%s\\n' .venv/ __pycache__/ '*.pyc' .pytest_cache/ /r2e_tests /run_tests.sh >>"$git_dir/info/exclude"
    ours add -A --ignore-errors >/dev/null || true
    # Where they convert, the blobs that their index names are not the bytes of their files.
    converted=$(find . -name .git -prune -o -name .gitattributes \\
        -exec grep -lE 'text|eol|crlf|filter|ident|encoding' {} +) || true
    [ -z "$converted" ] || ours add --renormalize --ignore-errors . >/dev/null || true
    ours write-tree
}
"""

# The snapshot owns its objects, whatever the agent does to those of its repository.
_ONE_COMMIT = """
base=
if is_one_commit; then
    export GIT_ALTERNATE_OBJECT_DIRECTORIES=$PWD/.git/objects
    base=$(snapshot)
    if [ "$base" = "$tree" ]; then
        echo "$base" | ours pack-objects -q --revs --window=0 --compression=1 "$git_dir/objects/pack/pack" >/dev/null
        rm -rf .git/COMMIT_EDITMSG .git/branches .git/description .git/hooks .git/logs
    else
        base=
        rm -rf "$git_dir"
    fi
    unset GIT_ALTERNATE_OBJECT_DIRECTORIES
fi
if [ -z "$base" ]; then
    make_one_commit
    cd "$workdir"
    if [ "$top" = "$workdir" ] && [ -f .git/index ]; then
        mkdir -p "$git_dir/objects/pack"
        ln .git/objects/pack/* "$git_dir/objects/pack/" || cp .git/objects/pack/* "$git_dir/objects/pack/"
    fi
    base=$(snapshot)
fi
echo "$base"
"""

_BUG = f"""
new_git_dir "$git_dir" base
ours apply --whitespace=nowarn {BUG_PATCH} || unusable "its bug does not apply: $(tail -n 1 {STATE}/set-up.log)"
rm -f {BUG_PATCH}
"""

# Where R2E-Gym's own runtime puts it, and trained models look for it.
_R2E = """
[ ! -d .venv ] || [ -e /root/.venv ] || ln -s "$PWD/.venv" /root/.venv || true
"""


def prologue(task: Task, *, for_agent: bool) -> str:
    """Shell text to put before every command, on its line: the environment that the image's users activate. Pure.

    None in SWE-bench's gradings: its eval script activates the environment itself, and must find none active.
    """
    if task.source is Source.SWE_BENCH and not for_agent:
        return ""
    match task.source:
        case Source.R2E:
            environment = f"{task.workdir}/.venv"
            return f"export PATH={shlex.quote(environment)}/bin:/root/.local/bin:$PATH; "
        case Source.SWE_BENCH | Source.SWE_SMITH:
            environment = f"{_CONDA}/envs/testbed"
            return (
                f"export PATH={environment}/bin:{_CONDA}/condabin:$PATH CONDA_PREFIX={environment} "
                "CONDA_DEFAULT_ENV=testbed; "
            )
    return ""


def set_up(task: Task) -> str:
    """Script that makes the image's repository the agent's: hidden tests out, then the history.

    Prints the tree that the agent starts from as its last line. `Task.bug_patch` must lie at BUG_PATCH.
    """
    quoted = shlex.quote(task.workdir)
    own = (*task.test_files, *(("run_tests.sh",) if task.source in (Source.OFFLINE, Source.R2E) else ()))
    return f"""{_START}
cd {quoted} || unusable "it has no folder "{quoted}
workdir=$PWD
test_files=({" ".join(shlex.quote(f"./{name}") for name in own)})
{_NEW_GIT_DIR}{_GIT_ENVIRONMENT}{_BUG if task.bug_patch else ""}
{_REMOVE_TESTS}{_R2E if task.source is Source.R2E else ""}
{_HOME}{FUNCTIONS}{_SNAPSHOT}{_ONE_COMMIT}"""


def diff(workdir: str, base: str) -> str:
    """Script that prints the change of `workdir` against the tree `base`, untracked files included."""
    return f"""set -eu
cd {shlex.quote(workdir)}
{_GIT_ENVIRONMENT}
exec 2>"$git_dir/stderr"
find . \\( -name .git -o -name .venv \\) -prune -o -type f -size +{_LARGEST} -printf '/%P\\n' >>"$git_dir/info/exclude"
ours add -A --ignore-errors >/dev/null || true
ours diff-index --cached -p --binary --full-index --no-renames --no-ext-diff --no-textconv --no-color {base} || {{
    status=$?
    cat "$git_dir/stderr"
    exit $status
}}
"""


def apply(workdir: str) -> str:
    """Script that applies the patch at PATCH to `workdir`, all of it or nothing, with git's exit code and complaint.

    No attribute, filter or configuration of the repository takes part.
    """
    return f"""set -eu
cd {shlex.quote(workdir)}
{OWN_GIT}
ours apply --whitespace=nowarn {PATCH}
rm -f {PATCH}
"""
