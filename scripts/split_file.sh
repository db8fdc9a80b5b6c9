#!/bin/bash
# Split a file that is larger than one transfer may be, and join its pieces again:
#
#   scripts/split_file.sh split model.gguf 45MB pieces
#   scripts/split_file.sh join pieces model.gguf
#
# A size is one of GNU split: 45MB is 45 * 10^6 bytes, 45M is 45 * 2^20. The folder of pieces holds
# 000.piece, 001.piece, ... and SHA256SUMS with the sums of the pieces. `join` checks them before it
# replaces the output file.
set -euo pipefail

refuse() {
    echo "split_file.sh: $1" >&2
    exit 2
}

usage="the arguments must be 'split FILE SIZE FOLDER' or 'join FOLDER FILE', got '$*'"
case "${1:-} $#" in
"split 4")
    file=$2 size=$3 folder=$4
    [ -f "$file" ] || refuse "FILE must be an existing file, got $file"
    [ ! -e "$folder" ] || refuse "FOLDER must not exist, got $folder; remove it"
    scratch=$(mktemp -d "$folder.XXXXXX")
    trap 'rm -rf "$scratch"' EXIT
    split --bytes="$size" \
        --numeric-suffixes --suffix-length=3 --additional-suffix=.piece "$file" "$scratch/" ||
        refuse "SIZE must be a size of GNU split, such as 45MB, got $size"
    (cd "$scratch" && sha256sum ./*.piece >SHA256SUMS)
    mv "$scratch" "$folder"
    ;;
"join 3")
    folder=$2 file=$3
    [ -f "$folder/SHA256SUMS" ] || refuse "FOLDER must hold SHA256SUMS, got $folder; split the file again"
    [ ! -d "$file" ] || refuse "FILE must not be a folder, got $file; name a file in it"
    (cd "$folder" && sha256sum --check --quiet --strict SHA256SUMS) ||
        refuse "the pieces in $folder must have the sums of SHA256SUMS; copy them again"
    mkdir -p "$(dirname "$file")"
    scratch=$(mktemp "$file.XXXXXX")
    trap 'rm -f "$scratch"' EXIT
    cut -c 67- "$folder/SHA256SUMS" | while read -r piece; do cat "$folder/$piece"; done >"$scratch"
    mv "$scratch" "$file"
    ;;
*) refuse "$usage" ;;
esac
