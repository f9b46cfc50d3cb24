package cloud

import (
	"crypto/subtle"
	"net/http"
	"strings"
	"sync"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// guard checks the tokens of calls.
type guard struct {
	admin string // empty admits every call

	mu   sync.Mutex
	open bool // admits every call
	api  []string
}

// newGuard returns a guard that admits calls with token; an empty one admits every call.
func newGuard(token string) *guard {
	return &guard{admin: token, open: token == "", api: []string{token}}
}

func (g *guard) replace(tokens []string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open, g.api = false, tokens
}

func (g *guard) mayCall(r *http.Request) bool {
	g.mu.Lock()
	defer g.mu.Unlock()

	return g.open || presents(r, g.api)
}

func (g *guard) mayAdminister(r *http.Request) bool {
	return g.admin == "" || presents(r, []string{g.admin})
}

// presents reports whether the call carries one of tokens, in constant time.
func presents(r *http.Request, tokens []string) bool {
	scheme, given, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	known := 0
	for _, t := range tokens {
		known |= subtle.ConstantTimeCompare([]byte(given), []byte(t))
	}

	return strings.EqualFold(scheme, "Bearer") && known == 1
}

func unauthorized() *cloudapi.Error {
	return refusal(http.StatusUnauthorized, cloudapi.CodeUnauthorized,
		"the bearer token is missing or wrong; send one that the cloud accepts")
}
