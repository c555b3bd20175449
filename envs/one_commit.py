"""The bash functions that put one commit in the place of a repository's history, so that no fix can be found in it.

A new git folder is built of nothing but what it needs: one commit of the tracked files as they lie there, one branch,
an index, the list of ignored files. So there is nothing else to forget: remotes, branches, tags, notes, reflog, stash,
hooks, configuration, packs and loose objects of the future, other worktrees' and submodules' git folders go with the
old folder. A submodule's files become files of the repository; untracked and ignored files stay what they are.

Objects are taken over packed as they were, guided by the old index, so that a large repository is not hashed again.
Where that fails (SHA-256 names, objects that are missing), the tracked files are hashed anew. A repository that is one
clean commit already, as those of our offline tasks, stays.
"""

STATE = "/var/tmp/agent-r3"  # folder in the sandbox

# checkStat and trustctime: a pulled layer has new inodes and ctimes, which would make git hash every file again.
# protectNTFS: names such as `a\b` are legal here.
CONFIG = """[core]
	repositoryformatversion = 0
	bare = false
	checkStat = minimal
	trustctime = false
	protectNTFS = false
	protectHFS = false
[gc]
	auto = 0
"""

# Defines `is_one_commit` and `make_one_commit`. Expects `unusable MESSAGE`, which ends the script, and
# `new_git_dir FOLDER BRANCH`.
FUNCTIONS = f"""
new={STATE}/repository.git

in_new() {{
    GIT_DIR=$new GIT_WORK_TREE=$top GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null HOME=/nonexistent \\
        XDG_CONFIG_HOME=/nonexistent GIT_LITERAL_PATHSPECS=1 \\
        GIT_AUTHOR_NAME=base GIT_AUTHOR_EMAIL=base@localhost GIT_AUTHOR_DATE=2000-01-01T00:00:00Z \\
        GIT_COMMITTER_NAME=base GIT_COMMITTER_EMAIL=base@localhost GIT_COMMITTER_DATE=2000-01-01T00:00:00Z "$@"
}}

# One commit of what the index tracks, as it lies in the worktree; its objects, and no others, in one pack.
pack_commit() {{
    in_new git add -u --ignore-errors . || true
    tree=$(in_new git write-tree) || return 1
    commit=$(in_new git commit-tree -m base "$tree" </dev/null) || return 1
    echo "$commit" >"$new/refs/heads/main"
    echo "$commit" | in_new git pack-objects -q --revs --window=0 --compression=1 "$new/objects/pack/pack" >/dev/null ||
        return 1
    rm -rf "$new"/objects/[0-9a-f][0-9a-f]
}}

# Files that git was told not to look at, and submodules, whose git folders are gone.
track_plainly() {{
    in_new git ls-files -v -z | LC_ALL=C sed -zn 's/^[a-zS] //p' >"$new/list" &&
        in_new git update-index --no-assume-unchanged -z --stdin <"$new/list" &&
        in_new git update-index --no-skip-worktree -z --stdin <"$new/list" &&
        in_new git ls-files -s -z | LC_ALL=C sed -zn 's/^160000 [^\\t]*\\t//p' >"$new/list" &&
        in_new git update-index --force-remove -z --stdin <"$new/list" || return 1
    while IFS= read -r -d '' module; do
        [ -z "$(ls -A "$module")" ] || in_new git add -- "$module" || return 1
    done <"$new/list"
    rm "$new/list"
}}

take_over() {{
    if [ -f "$old/index" ]; then
        # With its time, by which git tells which files may have changed since it was written.
        cp -p "$old/index" "$new/index" || return 1
        if compgen -G "$old/sharedindex.*" >/dev/null; then
            cp -p "$old"/sharedindex.* "$new/" && in_new git update-index --no-split-index || return 1
            rm -f "$new"/sharedindex.*
        fi
    else
        GIT_INDEX_FILE=$new/index git --git-dir="$old" read-tree HEAD || true
    fi
    export GIT_ALTERNATE_OBJECT_DIRECTORIES=$common/objects
    odd=$(in_new git ls-files -v -s | LC_ALL=C grep -cE '^([a-zS] |. 160000 )') || true
    [ "$odd" = 0 ] || track_plainly || return 1
    pack_commit
}}

hash_anew() {{
    unset GIT_ALTERNATE_OBJECT_DIRECTORIES
    rm -rf "$new"
    new_git_dir "$new" main
    git --git-dir="$old" --work-tree="$top" ls-files -z >"$new/list" || return 1
    while IFS= read -r -d '' name; do
        if [ -d "$name" ] && [ ! -L "$name" ]; then find "$name" ! -type d -print0; else printf '%s\\0' "$name"; fi
    done <"$new/list" | in_new git update-index --add --remove -z --stdin || return 1
    rm "$new/list"
    pack_commit
}}

# Object folders that the repository borrowed from, all the way down.
remove_lenders() {{
    [ -f "$1/info/alternates" ] || return 0
    while IFS= read -r lender; do
        case $lender in ""|"#"*) continue ;; /*) ;; *) lender=$1/$lender ;; esac
        [ -d "$lender" ] || continue
        remove_lenders "$lender"
        rm -rf "$lender" || return 1
    done <"$1/info/alternates"
}}

remove_worktrees() {{
    for link in "$common"/worktrees/*/gitdir; do
        [ -f "$link" ] || continue
        other=$(cat "$link")
        other=${{other%/.git}}
        case $top/ in "$other"/*) ;; *) rm -rf "$other" || return 1 ;; esac
    done
}}

# Whether the workdir's repository is one commit of unpacked objects already, and holds nothing else but what is taken
# out below; `tree` is that commit's. Some of it can be seen from the files' names, the rest by one look at the objects.
is_one_commit() {{
    [ -d .git ] && [ ! -L .git ] && [ -f .git/index ] || return 1
    shopt -s nullglob dotglob
    entries=(.git/* .git/info/* .git/objects/info/* .git/objects/pack/*)
    refs=(.git/refs/*/*)
    loose=(.git/objects/??/*)
    shopt -u nullglob dotglob
    for entry in "${{entries[@]#.git/}}"; do
        case $entry in
            HEAD|config|index|info|objects|objects/info|objects/pack|refs|info/exclude) ;;
            COMMIT_EDITMSG|branches|description|hooks|logs) ;;
            *) return 1 ;;
        esac
    done
    head=$(<.git/HEAD)
    [ "${{refs[*]}}" = ".git/${{head#ref: }}" ] && [ -f "${{refs[0]}}" ] || return 1
    while read -r line || [ -n "$line" ]; do
        case $line in
            "[core]"|"repositoryformatversion = 0"|"filemode = true"|"bare = false"|"logallrefupdates = true") ;;
            *) return 1 ;;
        esac
    done <.git/config
    mapfile -t reachable < <(git --git-dir=.git rev-list --objects --parents HEAD)
    [ "${{#reachable[@]}}" = "${{#loose[@]}}" ] || return 1
    case ${{reachable[0]}} in *" "*) return 1 ;; esac
    tree=${{reachable[1]%% *}}
}}

# For the repository that the working directory belongs to, if there is one; `top` is its folder then. What is no
# repository, though it is called .git, goes.
make_one_commit() {{
    top=$PWD
    while [ ! -e "$top/.git" ] && [ -n "$top" ]; do top=${{top%/*}}; done
    [ -e "$top/.git" ] || return 0
    top=${{top:-/}}
    cd "$top"
    old=.git  # a folder, a link to one, or a file that names one (worktree, submodule)
    [ ! -f .git ] || old=$(sed -n 's/^gitdir: //p' .git)
    old=$(cd "$old" && pwd -P) || old=
    if [ -f "$old/HEAD" ]; then
        common=$old
        [ ! -f "$old/commondir" ] || common=$(cd "$old" && cd "$(cat commondir)" && pwd -P)
        new_git_dir "$new" main
        for file in exclude attributes; do
            [ ! -f "$common/info/$file" ] || printf '%s\\n' "$(<"$common/info/$file")" >"$new/info/$file"
        done
        take_over || hash_anew || unusable "git cannot read its repository $top/.git"
        unset GIT_ALTERNATE_OBJECT_DIRECTORIES
        remove_lenders "$common/objects" && remove_worktrees && rm -rf "$old" "$common" ||
            unusable "its user ($(id -un)) cannot remove the history in $common"
    fi
    [ ! -e .git ] && [ ! -L .git ] || rm -rf .git || unusable "its user ($(id -un)) cannot remove $top/.git"
    [ ! -d "$new" ] || mv "$new" .git || unusable "its user ($(id -un)) cannot write to $top"
}}
"""
