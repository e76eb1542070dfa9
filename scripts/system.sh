#!/bin/sh
# What tests and kernels want beyond Python packages. Lists what is missing, and installs it where apt-get may be run;
# nothing calls this by itself. Exit status 1: something is still missing.
#   libibverbs1 libnuma1 libcurl4   the Mooncake client        iproute2 util-linux   its nodes' network namespace
#   fuse3 libfuse2                  disk faults                openssl               TLS of a test server
#   g++                             the copy kernels           chromium              pages of reports
set -eu
WANTED="libibverbs1 libnuma1 libcurl4 iproute2 util-linux fuse3 libfuse2 openssl g++ chromium"

if ! command -v dpkg-query >/dev/null; then
    echo "system: not a Debian system. Install what corresponds to: $WANTED"
    exit 1
fi

missing() {
    for package in $WANTED; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q "ok installed" || printf '%s ' "$package"
    done
}

MISSING=$(missing)
[ -n "$MISSING" ] || { echo "system: everything is here: $WANTED"; exit 0; }
echo "system: missing: $MISSING"
if [ "$(id -u)" != 0 ]; then
    echo "system: as root: apt-get install -y --no-install-recommends $MISSING"
    exit 1
fi
apt-get update -qq
# shellcheck disable=SC2086  # a list of names
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $MISSING >/dev/null
[ -z "$(missing)" ]
