package cloudapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
)

// An Admin changes the knobs of one cloud and reads its log. Its methods are safe for
// concurrent use and return the same errors as those of [Client].
type Admin struct{ conn }

// NewAdmin returns an admin of the cloud at endpoint. adminToken is the token with which
// the cloud was started; it stays valid when API tokens are replaced.
func NewAdmin(endpoint, adminToken string, opts ...Option) (*Admin, error) {
	c, err := newConn(endpoint, adminToken, opts)
	if err != nil {
		return nil, err
	}

	return &Admin{c}, nil
}

// Knobs returns the current knobs.
func (a *Admin) Knobs(ctx context.Context) (*Knobs, error) {
	return call[Knobs](ctx, a.conn, http.MethodGet, "/v1/admin/knobs", nil)
}

// Patch changes the knobs that patch names, and returns all knobs.
func (a *Admin) Patch(ctx context.Context, patch KnobsPatch) (*Knobs, error) {
	return call[Knobs](ctx, a.conn, http.MethodPatch, "/v1/admin/knobs", patch)
}

// Release releases the held creates of instances whose name matches pattern, and returns
// their number. Later creates are held as before.
func (a *Admin) Release(ctx context.Context, pattern string) (int, error) {
	out, err := call[ReleaseResponse](ctx, a.conn, http.MethodPost, "/v1/admin/release", ReleaseRequest{Name: pattern})
	if err != nil {
		return 0, err
	}

	return out.Released, nil
}

// SetTokens replaces the accepted API tokens.
func (a *Admin) SetTokens(ctx context.Context, tokens ...string) error {
	_, err := call[struct{}](ctx, a.conn, http.MethodPost, "/v1/admin/tokens", TokensRequest{Tokens: tokens})

	return err
}

// Stats returns the figures.
func (a *Admin) Stats(ctx context.Context) (*Stats, error) {
	return call[Stats](ctx, a.conn, http.MethodGet, "/v1/admin/stats", nil)
}

// Log returns the entries with a higher Seq than after; 0 means all.
func (a *Admin) Log(ctx context.Context, after uint64) ([]LogEntry, error) {
	resp, err := a.send(ctx, http.MethodGet, "/v1/admin/log?after="+strconv.FormatUint(after, 10), nil)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	var entries []LogEntry
	for decoder := json.NewDecoder(resp.Body); ; {
		var e LogEntry
		switch err := decoder.Decode(&e); {
		case errors.Is(err, io.EOF):
			return entries, nil
		case err != nil:
			return nil, fmt.Errorf("virtual cloud: log: %w", err)
		}
		entries = append(entries, e)
	}
}
