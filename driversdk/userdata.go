package driversdk

import (
	"bytes"
	"cmp"
	"context"
	"net/url"
	"slices"
	"strings"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// placeholderStarts are what a placeholder in user data begins with, plain and
// URL query escaped.
var placeholderStarts = [][]byte{[]byte("<<"), []byte("%3C%3C"), []byte("%3c%3c")}

// userData returns the machine's user data with its own values filled in, and
// those values. User data without placeholders asks the manager for nothing.
func (c *classes[S]) userData(
	ctx context.Context, cluster, operationID string, m *driverv1.Machine, stored []byte,
) (UserData, map[string]string, error) {
	if !slices.ContainsFunc(placeholderStarts, func(start []byte) bool { return bytes.Contains(stored, start) }) {
		return stored, nil, nil
	}
	values, err := spanned(ctx, "fetch "+whatBootstrap, func(ctx context.Context) (map[string]string, error) {
		return c.fetch.Bootstrap(ctx, cluster, operationID, m)
	})
	c.metrics.fetched(whatBootstrap, err)
	if err != nil {
		ref := &driverv1.ObjectReference{Namespace: m.GetNamespace(), Name: m.GetName()}

		return nil, nil, fetchError("bootstrap values of machine", ref, err)
	}

	return fill(stored, values), values, nil
}

// fill replaces placeholders in their plain and their URL query escaped form.
// What is filled in is not looked through again.
func fill(text []byte, values map[string]string) UserData {
	placeholders := make([]string, 0, len(values))
	for p := range values {
		if p != "" {
			placeholders = append(placeholders, p)
		}
	}
	// The longest first, for one that begins like another.
	slices.SortFunc(placeholders, func(a, b string) int {
		return cmp.Or(cmp.Compare(len(b), len(a)), strings.Compare(a, b))
	})
	var pairs []string
	for _, p := range placeholders {
		pairs = append(pairs, p, values[p])
		if escaped := url.QueryEscape(p); escaped != p {
			pairs = append(pairs, escaped, url.QueryEscape(values[p]))
		}
	}

	return UserData(strings.NewReplacer(pairs...).Replace(string(text)))
}
