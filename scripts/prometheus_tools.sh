#!/bin/sh
# Debian's Prometheus and Alertmanager, unpacked into .tools: nothing is installed and no service is started.
set -eu
cd "$(dirname "$0")/.."
mkdir -p .tools
cd .tools
[ -x usr/bin/prometheus ] && [ -x usr/bin/prometheus-alertmanager ] && exit 0
command -v apt-get >/dev/null || { echo "no apt-get here: the tests that want Prometheus will be skipped"; exit 0; }
fetch() { timeout 240 apt-get -qq download prometheus prometheus-alertmanager; }
fetch 2>/dev/null || { timeout 90 apt-get -qq update && fetch; } || {
  echo "no Prometheus to be had here: the tests that want one will be skipped"; exit 0; }
for package in *.deb; do dpkg -x "$package" .; rm "$package"; done
echo "unpacked Prometheus and Alertmanager into .tools"
