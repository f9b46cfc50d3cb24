package machinedeployment

import (
	"errors"
	"maps"
	"sync"
	"time"
)

const (
	// nodeTries is how many Nodes that cannot be changed a pass tries: each may take as
	// long as a webhook or an API server does not answer. The next pass tries others.
	nodeTries = 3
	// nodeRetry is when a Node that could not be changed is tried again.
	nodeRetry = time.Minute
)

// errLater is for a Node whose turn it is not in this pass.
var errLater = errors.New("another pass changes the node")

// nodeFaults remembers which Nodes could not be changed, so that all others have
// their turn. It is safe for concurrent use.
type nodeFaults struct {
	mu     sync.Mutex
	byName map[string]nodeFault
}

type nodeFault struct {
	err error
	at  time.Time
}

// note remembers why a Node could not be changed, for as long as that is not tried
// again.
func (f *nodeFaults) note(name string, err error, now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	maps.DeleteFunc(f.byName, func(_ string, fault nodeFault) bool { return fault.over(now) })
	if f.byName == nil {
		f.byName = map[string]nodeFault{}
	}
	f.byName[name] = nodeFault{err, now}
}

// recent returns why a Node could not be changed a short while ago; nil if it is to
// be tried.
func (f *nodeFaults) recent(name string, now time.Time) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if fault, ok := f.byName[name]; ok && !fault.over(now) {
		return fault.err
	}

	return nil
}

func (f nodeFault) over(now time.Time) bool { return now.Sub(f.at) >= nodeRetry }
