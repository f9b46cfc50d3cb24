package bootstrap

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/types"
)

// A token is <id>.<secret>. Both are of lower-case letters and digits, of these
// lengths.
const (
	idLength     = 6
	secretLength = 16
)

// candidates is how many ids a machine may try. There are two billion ids: if all
// candidates are taken, that was done on purpose.
const candidates = 3

// tokenID returns the n-th candidate for the id of a machine's token.
func tokenID(uid types.UID, n int) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s/%d", uid, n))
	text := strconv.FormatUint(binary.BigEndian.Uint64(sum[:]), 36)

	return strings.Repeat("0", max(0, idLength-len(text))) + text[max(0, len(text)-idLength):]
}

// newSecret returns the secret half of a token: 80 random bits.
func newSecret() string { return strings.ToLower(rand.Text()[:secretLength]) }

var (
	secretPattern = regexp.MustCompile(`^[a-z0-9]{16}$`)
	groupPattern  = regexp.MustCompile(`^system:bootstrappers:[a-z0-9:-]{0,255}[a-z0-9]$`)
)

// ValidateGroups returns an error if the API server would refuse tokens with these
// groups, which are separated by commas. An empty list is valid.
func ValidateGroups(groups string) error {
	if groups == "" {
		return nil
	}
	for group := range strings.SplitSeq(groups, ",") {
		if !groupPattern.MatchString(group) {
			return fmt.Errorf("group %q of bootstrap tokens: want system:bootstrappers: followed by "+
				"lower-case letters, digits, colons and dashes, with a letter or digit at the end", group)
		}
	}

	return nil
}
