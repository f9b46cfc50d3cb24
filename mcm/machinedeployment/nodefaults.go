package machinedeployment

import (
	"errors"
	"maps"
	"sync"
	"time"
)

const (
	// nodeTries is how many Nodes that cannot be changed a pass tries, and how many of
	// which that is known, again: each may take as long as a webhook or an API server
	// does not answer. The next pass tries others.
	nodeTries = 3
	// nodeRetry is when a Node that could not be changed is tried again, nodeForget when
	// nothing is remembered of it: far longer than passes take that meet many of them.
	nodeRetry, nodeForget = time.Minute, time.Hour
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

// note remembers why a Node could not be changed.
func (f *nodeFaults) note(name string, err error, now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	maps.DeleteFunc(f.byName, func(_ string, fault nodeFault) bool { return now.Sub(fault.at) >= nodeForget })
	if f.byName == nil {
		f.byName = map[string]nodeFault{}
	}
	f.byName[name] = nodeFault{err, now}
}

// of reports whether a Node could not be changed before, and why, if that is so recent
// that it is not to be tried again.
func (f *nodeFaults) of(name string, now time.Time) (known bool, recent error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	fault, known := f.byName[name]
	if known && now.Sub(fault.at) < nodeRetry {
		return true, fault.err
	}

	return known, nil
}

// forget is for a Node that was changed.
func (f *nodeFaults) forget(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.byName, name)
}
