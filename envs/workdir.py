"""The bash scripts that ready a repository for the agent and take its change out again.

The change is measured with a git folder of our own beside the repository, so that nothing the agent or the repository
configures takes part: no index, hooks, filters, attributes, drivers or line-ending conversion of theirs. Its objects
are borrowed from the repository where there is one; a folder without git works too.
"""

import shlex

UNUSABLE = 90  # exit code of SET_UP for an image that lacks what every image must have; the output says what

_GIT_DIR = "/var/tmp/agent-r3/base.git"
_LARGEST = "16M"  # untracked files above this are cores, dumps and datasets, not a change to source

_GIT_ENVIRONMENT = f"""
git_dir={_GIT_DIR}
ours() {{
    GIT_DIR=$git_dir GIT_WORK_TREE=$PWD GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null HOME=/nonexistent \\
        XDG_CONFIG_HOME=/nonexistent git "$@"
}}
"""

# Compiled test modules tell what the hidden tests expect.
_REMOVE_TESTS = """
rm -rf /r2e_tests ./r2e_tests ./run_tests.sh
find . \\( -name .git -o -name .venv \\) -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
"""

# Without an identity `git commit` refuses; without safe.directory git refuses a folder of another owner.
_IDENTITY = """
[ -e ~/.gitconfig ] || printf '%s\\n' '[user]' 'name = agent' 'email = agent@localhost' '[safe]' 'directory = *' \\
    >~/.gitconfig || true
"""

# checkStat and trustctime: a pulled layer has new inodes and ctimes, which would make git hash every file again.
# protectNTFS: names such as `a\b` are legal here. The attributes make git take every file as the bytes it is.
_SNAPSHOT = """
mkdir -p "$git_dir/objects/info" "$git_dir/refs/heads" "$git_dir/info"
echo 'ref: refs/heads/base' >"$git_dir/HEAD"
printf '%s\\n' '[core]' 'repositoryformatversion = 0' 'bare = false' 'checkStat = minimal' 'trustctime = false' \\
    'protectNTFS = false' 'protectHFS = false' '[gc]' 'auto = 0' >"$git_dir/config"
echo '* -text !eol -filter -ident -working-tree-encoding !diff' >"$git_dir/info/attributes"
if [ -d .git ]; then
    echo "$PWD/.git/objects" >"$git_dir/objects/info/alternates"
    [ ! -f .git/info/exclude ] || cat .git/info/exclude >"$git_dir/info/exclude"
    # Their index saves hashing the tree.
    [ ! -f .git/index ] || cp .git/index "$git_dir/index"
fi
printf '%s\\n' .venv/ __pycache__/ '*.pyc' .pytest_cache/ /r2e_tests /run_tests.sh >>"$git_dir/info/exclude"
ours add -A --ignore-errors >/dev/null 2>&1 || true
# Where they convert, the blobs that their index names are not the bytes of their files.
converted=$(find . -name .git -prune -o -name .gitattributes \\
    -exec grep -lE 'text|eol|crlf|filter|ident|encoding' {} +) || true
[ -z "$converted" ] || ours add --renormalize --ignore-errors . >/dev/null 2>&1 || true
ours write-tree
"""


def set_up(workdir: str) -> str:
    """Script that removes the hidden tests and prints the tree that the agent starts from as its last line."""
    quoted = shlex.quote(workdir)
    return f"""set -eu
command -v git >/dev/null || {{ echo "it has no git"; exit {UNUSABLE}; }}
cd {quoted} 2>/dev/null || {{ echo "it has no folder "{quoted}; exit {UNUSABLE}; }}
{_REMOVE_TESTS}{_IDENTITY}{_GIT_ENVIRONMENT}{_SNAPSHOT}"""


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
