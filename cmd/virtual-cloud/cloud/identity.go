package cloud

import (
	"net/http"
	"time"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// A claim makes other creates with the same token or name wait until its create is
// settled. After that it maps the token to the instance.
type claim struct {
	req     cloudapi.CreateRequest
	settled chan struct{} // closed once made or failed
	made    *instance     // nil until then, and if the create failed
}

type usedToken struct {
	token string
	until time.Time
}

// claim returns the existing instance of a create, or a claim that others wait for.
// c.mu is held, but not while it waits.
func (c *Cloud) claim(w *creation) (found *instance, mine *claim, _ *cloudapi.Error) {
	switch w.req.Identity {
	case cloudapi.IdentityToken:
		return c.claimToken(w)
	case cloudapi.IdentityUniqueName:
		mine, err := c.claimName(w)

		return nil, mine, err
	default:
		return nil, &claim{req: w.req, settled: make(chan struct{})}, nil
	}
}

func (c *Cloud) claimToken(w *creation) (found *instance, mine *claim, _ *cloudapi.Error) {
	for {
		c.forgetTokens()
		other, ok := c.tokens[w.req.IdempotencyToken]
		switch {
		case !ok:
			mine := &claim{req: w.req, settled: make(chan struct{})}
			c.tokens[w.req.IdempotencyToken] = mine

			return nil, mine, nil
		case !sameParameters(&other.req, &w.req):
			err := refusal(http.StatusConflict, cloudapi.CodeTokenMismatch,
				"the idempotency token was used for instance %q of type %q in %q %q",
				other.req.Name, other.req.MachineType, other.req.Region, other.req.Zone)
			err.InstanceID = other.id()

			return nil, nil, err
		case other.made == nil:
			if err := c.await(other.settled); err != nil {
				return nil, nil, err
			}
		case other.made.State == cloudapi.StateDeleting, other.made.State == cloudapi.StateGone:
			err := refusal(http.StatusConflict, cloudapi.CodeTokenUsed,
				"the idempotency token was used for instance %s, which has been deleted; use a new token", other.id())
			err.InstanceID = other.id()

			return nil, nil, err
		default:
			return other.made, nil, nil
		}
	}
}

func (c *Cloud) claimName(w *creation) (*claim, *cloudapi.Error) {
	for {
		for _, i := range c.order {
			if i.Name == w.req.Name {
				err := refusal(http.StatusConflict, cloudapi.CodeAlreadyExists,
					"there is already an instance %q, %s", i.Name, i.ID)
				err.InstanceID = i.ID

				return nil, err
			}
		}
		other, ok := c.names[w.req.Name]
		if !ok {
			mine := &claim{req: w.req, settled: make(chan struct{})}
			c.names[w.req.Name] = mine

			return mine, nil
		}
		if err := c.await(other.settled); err != nil {
			return nil, err
		}
	}
}

// settle ends the wait of other creates. After a failure the token may be used again.
// Only the first call has an effect. c.mu is held.
func (mine *claim) settle(c *Cloud, made *instance) {
	select {
	case <-mine.settled:
		return
	default:
	}
	mine.made = made
	if c.names[mine.req.Name] == mine {
		delete(c.names, mine.req.Name)
	}
	if token := mine.req.IdempotencyToken; made == nil && c.tokens[token] == mine {
		delete(c.tokens, token)
	}
	close(mine.settled)
}

// forgetTokens drops tokens whose instance was deleted tokenLife ago. c.mu is held.
func (c *Cloud) forgetTokens() {
	now := time.Now()
	for len(c.used) > 0 && !now.Before(c.used[0].until) {
		delete(c.tokens, c.used[0].token)
		c.used = c.used[1:]
	}
}

// retireToken starts the time after which the token of a deleted instance may be
// used again. c.mu is held.
func (c *Cloud) retireToken(i *instance) {
	if stands, ok := c.tokens[i.token]; ok && stands.made == i {
		c.used = append(c.used, usedToken{token: i.token, until: time.Now().Add(tokenLife)})
	}
}

// await waits with c.mu unlocked.
func (c *Cloud) await(settled <-chan struct{}) *cloudapi.Error {
	c.mu.Unlock()
	defer c.mu.Lock()
	select {
	case <-settled:
		return nil
	case <-c.ctx.Done():
		return errShutdown()
	}
}

func (mine *claim) id() string {
	if mine.made == nil {
		return ""
	}

	return mine.made.ID
}

// sameParameters compares the parameters to which a token is bound. Tags and user data
// may differ: a repeated create of a machine may carry a newer bootstrap token.
func sameParameters(a, b *cloudapi.CreateRequest) bool {
	return a.Name == b.Name && a.MachineType == b.MachineType && a.Region == b.Region && a.Zone == b.Zone
}
