#!/bin/sh
# Debian's Prometheus and Alertmanager, unpacked into .tools: nothing is installed and no service is started. All that lies
# outside are the templates that this Alertmanager wants where it was built for; only root can put them there.
set -eu
cd "$(dirname "$0")/.."
mkdir -p .tools
cd .tools
fetch() { timeout 240 apt-get -qq download prometheus prometheus-alertmanager; }
if ! [ -x usr/bin/prometheus-alertmanager ]; then
  command -v apt-get >/dev/null || { echo "no apt-get here: the tests that want Prometheus will be skipped"; exit 0; }
  fetch 2>/dev/null || { timeout 90 apt-get -qq update && fetch; } || {
    echo "no Prometheus to be had here: the tests that want one will be skipped"; exit 0; }
  for package in *.deb; do dpkg -x "$package" .; rm "$package"; done
  echo "unpacked Prometheus and Alertmanager into .tools"
fi
folder=usr/share/prometheus/alertmanager
if ! [ -e "/$folder/default.tmpl" ]; then
  install -D -m 644 -t "/$folder" "$folder"/*.tmpl 2>/dev/null ||
    echo "only root can put templates into /$folder: the tests that want Alertmanager will be skipped"
fi
