# Sourced by the scripts of this folder: wheels by hash, kept in $CACHE, for the machine $ARCH; by pip of $PYTHON.

# fetch REQUIREMENTS PYTHON...: prints a folder with the wheels of that file for those versions of Python
fetch() {
  local file=$1 folder version
  shift
  folder=$CACHE/$(basename "$file" .txt)-$(printf '%s' "$ARCH $*" | cat - "$file" | sha256sum | cut -c1-16)
  if [ ! -d "$folder" ]; then
    echo "images: fetching the wheels of $file for Python $*" >&2
    rm -rf "$folder.partial" && mkdir -p "$folder.partial"
    for version; do
      "$PYTHON" -m pip download -q --disable-pip-version-check --no-deps --require-hashes --only-binary=:all: \
        --python-version "$version" --implementation cp \
        --platform "manylinux2014_$ARCH" --platform "manylinux_2_28_$ARCH" --platform "manylinux_2_34_$ARCH" \
        --dest "$folder.partial" -r "$file" >&2
    done
    mv "$folder.partial" "$folder"
  fi
  echo "$folder"
}
