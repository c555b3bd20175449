"""Images whose repositories hide a fix wherever git can keep one: the word FUTURE stands in every object of it."""

import docker
import pytest

from tests.support.docker import build_image

# /testbed is at the second of three commits; the third is a remote branch, a tag, a linked worktree's, and packed.
_HISTORY = r"""
FROM {base}
RUN ldconfig && git config --global user.name someone && git config --global user.email someone@localhost \
 && git config --global protocol.file.allow always && git config --global init.defaultBranch main \
 && git init -q /src && cd /src && printf '*.txt text=auto\n*.eol text eol=crlf\n' >.gitattributes \
 && printf 'ignored*\n' >.gitignore && printf 'one\ntwo\n' >plain.py && printf 'x\n' >gone.py \
 && printf 'a\r\nb\r\n' >crlf.txt && printf 'a\r\nb\r\n' >crlf.eol && printf '\0\377' >binary \
 && ln -s plain.py link && printf 'v\n' >flagged.py \
 && printf 'v\n' >skipped.py && git add -A && git commit -qm first \
 && git init -q /module && cd /module && echo 'part = 1' >part.py && git add -A && git commit -qm part \
 && echo FUTURE >part.py && git commit -qam FUTURE && git checkout -q --detach HEAD^ \
 && cd /src && git submodule --quiet add /module sub && git commit -qm second && git tag v1 \
 && sed -i s/two/FUTURE/ plain.py && git commit -qam 'FUTURE fix' && git tag -am FUTURE v2 \
 && git clone -q --mirror /src /mirror.git && git clone -q --no-hardlinks --reference /mirror.git /src /testbed \
 && cd /testbed && git submodule --quiet update --init
RUN cd /testbed && git reset -q --hard HEAD^ && git submodule --quiet update \
 && git worktree add -q /elsewhere v2 && git notes add -m FUTURE HEAD \
 && echo FUTURE >plain.py && git stash -q && echo FUTURE >plain.py && git commit -qam FUTURE \
 && git reset -q --hard HEAD^ && git repack -qad && echo FUTURE >dangling.py && git add dangling.py \
 && git commit -qm FUTURE && git reset -q --hard HEAD^ && git branch other v2 \
 && git bisect start v2 v1 && git bisect reset && git checkout -q main \
 && mkdir -p dep && git clone -q --no-hardlinks /src dep/nested \
 && git -C dep/nested checkout -q --detach HEAD^ && printf '#!/bin/sh\ntouch /tmp/ran\n' >.git/hooks/pre-commit \
 && chmod +x .git/hooks/pre-commit && git config credential.helper store \
 && git config core.fsmonitor 'touch /tmp/ran;' \
 && git config http.extraHeader 'Authorization: secret' && git config --global credential.helper store \
 && git config --system url.https://secret@example.org/.insteadOf https://example.org/ \
 && echo https://secret@example.org >/root/.git-credentials && rm -rf /src /module \
 && git update-index --assume-unchanged flagged.py && echo changed >flagged.py \
 && git update-index --skip-worktree skipped.py && rm skipped.py \
 && echo three >>plain.py && rm gone.py && echo new >untracked.py && echo kept >ignored.py \
 && mkdir .pytest_cache && touch .pytest_cache/lastfailed && rm -f /tmp/ran
WORKDIR /testbed
"""

# One repository a shape, each a file `a.py` of two commits ago and FUTURE in the last one.
_SHAPES = r"""
FROM {base}
RUN ldconfig && git config --global user.name someone && git config --global user.email someone@localhost \
 && make() { path=$1; shift; git init -q "$@" "$path" && cd "$path" \
    && mkdir part && echo a >a.py && echo b >part/b.py && git add -A \
    && git commit -qm first && echo FUTURE >a.py && git commit -qam FUTURE && git reset -q --hard HEAD^; } \
 && make /sha256 --object-format=sha256 && mkdir /kept && make /gitfile --separate-git-dir=/kept/git.dir \
 && make /whole && make /main && git worktree add -q /worktree HEAD \
 && make /damaged && find .git/objects -type f -delete \
 && mkdir /unborn && cd /unborn && git init -q && echo a >a.py && make /noindex && rm .git/index \
 && make /split && git update-index --split-index \
 && mkdir /broken && cd /broken && echo a >a.py && echo nonsense >.git \
 && make /linked && mv .git /moved && ln -s /moved .git \
 && git init -q /single && cd /single && mkdir part && echo a >a.py && echo b >part/b.py && git add -A \
 && git commit -qm first && cp -r /single /dirty && echo c >>/dirty/a.py && cp -r /single /dangling && cd /dangling \
 && echo FUTURE | git hash-object -w --stdin \
 && useradd -m app && make /mine && chown -R app /mine && make /roots && cp -r /mine /testsleft \
 && mkdir /testsleft/r2e_tests && touch /testsleft/r2e_tests/test_1.py && chown -R app /testsleft \
 && chown root /testsleft/r2e_tests /testsleft
"""


@pytest.fixture(scope="session")
def history_image(docker_engine: docker.APIClient) -> str:
    return build_image(docker_engine, "history", _HISTORY)


@pytest.fixture(scope="session")
def shapes_image(docker_engine: docker.APIClient) -> str:
    return build_image(docker_engine, "shapes", _SHAPES)


@pytest.fixture(scope="session")
def user_image(docker_engine: docker.APIClient, shapes_image: str) -> str:
    """The same repositories; its user is `app`, who owns /mine only."""
    return build_image(docker_engine, "user", f"FROM {shapes_image}\nUSER app\n")
