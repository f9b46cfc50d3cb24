#!/usr/bin/env bash
# Checks the prose of the documents: words that hide who does what, and sentences that are too long to read once.
# Code blocks and texts in backticks are exempt; the cells of tables count for their words only. CHANGELOG.md is exempt.
# Prints for each document its sentences, the median of their lengths, and the length that nine of ten stay within.
set -euo pipefail
cd "$(dirname "$0")/.."

git ls-files -z --cached --others --exclude-standard -- '*.md' ':!:CHANGELOG.md' | xargs -0 awk '
BEGIN {
	longest = 45
	split("told,tells,somebody,nobody,whoever,anew,what is", bad, ",")
}
FNR == 1 { finish(); file = FILENAME; fenced = 0; count = 0 }
/^[ >]*(```|~~~)/ { end_block(); fenced = !fenced; next }
fenced { next }
/^[ ]*[|]/ || /^#/ { end_block(); check_words($0, FNR); next }
/^[ >]*$/ { end_block(); next }
/^[ >]*([-*+]|[0-9]+[.])[ ]/ { end_block(); sub(/^[ >]*([-*+]|[0-9]+[.])[ ]+/, "") }
{
	if (block == "") start = FNR
	sub(/^[ >]+/, "")
	block = block " " $0
}
END { finish(); exit failed }

# A paragraph or an item of a list is over.
function end_block(    rest, sentence) {
	if (block == "") return
	rest = check_words(block, start) " "
	block = ""
	while (match(rest, /[.!?][)"]*[ ]+/)) {
		sentence = substr(rest, 1, RSTART)
		rest = substr(rest, RSTART + RLENGTH)
		measure(sentence)
	}
	measure(rest)
}

# Returns the text as a reader counts it: code is one word, and the target of a link is none.
function check_words(text, line,    i, plain) {
	gsub(/`[^`]*`/, "Code", text)
	gsub(/\]\([^)]*\)/, "", text)
	gsub(/[][*_]/, "", text)
	plain = tolower(text)
	gsub(/[^a-z]+/, " ", plain)
	for (i in bad) if (index(" " plain " ", " " bad[i] " ")) fail(line, "\"" bad[i] "\": say who does it, or name the thing")
	return text
}

function measure(sentence,    n, i, parts, size) {
	n = split(sentence, parts, " ")
	for (i = 1; i <= n; i++) if (parts[i] ~ /[A-Za-z0-9]/) size++
	if (!size) return
	sizes[++count] = size
	if (size > longest) fail(start, "a sentence of " size " words, more than " longest ": " substr(sentence, 1, 60) "…")
}

function finish(    i, j, size) {
	end_block()
	if (!count) return
	for (i = 2; i <= count; i++) { # mawk has no sort
		size = sizes[i]
		for (j = i - 1; j >= 1 && sizes[j] > size; j--) sizes[j + 1] = sizes[j]
		sizes[j + 1] = size
	}
	printf "%-44s %4d sentences, median %2d words, 90%% within %2d\n", file, count, sizes[int((count + 1) / 2)], sizes[int((9 * count + 9) / 10)]
}

function fail(line, why) { print file ":" line ": " why > "/dev/stderr"; failed = 1 }
'
