#!/bin/sh
# Debian's chromium, for the playground's tests. Needs root and a package mirror.
set -e
command -v chromium >/dev/null && exit 0
command -v apt-get >/dev/null || { echo "no apt-get: install chromium by hand" >&2; exit 1; }
[ "$(id -u)" = 0 ] || { echo "not root: run $0 as root" >&2; exit 1; }
timeout 300 apt-get update -qq
DEBIAN_FRONTEND=noninteractive timeout 600 apt-get install -y -qq --no-install-recommends chromium
