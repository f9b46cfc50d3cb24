package machine

import (
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/machinebus/machinebus/mcm/dispatch"
)

// sayf and warnf record a Normal and a Warning Event on the machine at once. sayAfterWritef and
// warnAfterWritef record one about the next write to the machine, once that has succeeded:
// after a conflict the next pass finds the same again. EVENTS.md explains the reasons.
func (o *object) sayf(reason, format string, args ...any) {
	o.events.Eventf(o.machine, corev1.EventTypeNormal, reason, format, args...)
}

func (o *object) warnf(reason, format string, args ...any) {
	o.events.Eventf(o.machine, corev1.EventTypeWarning, reason, format, args...)
}

func (o *object) sayAfterWritef(reason, format string, args ...any) {
	o.notes = append(o.notes, func() { o.sayf(reason, format, args...) })
}

func (o *object) warnAfterWritef(reason, format string, args ...any) {
	o.notes = append(o.notes, func() { o.warnf(reason, format, args...) })
}

func (o *object) sayDeleted(providerID string, state dispatch.State) {
	o.sayf("InstanceDeleted", "Deleted instance %s in %s (driver replica %s, attempt %d)",
		providerID, state.Took.Round(time.Millisecond), orPlain(state.Replica), state.Attempt)
}

// A subject is a matter about which an Event on a machine is not repeated.
type subject struct {
	uid types.UID
	of  string
}

// The subjects of a machine.
const (
	aboutFields       = "fields"
	aboutWish         = "wish"
	aboutPreserve     = "preservation"
	aboutPreserveWait = "drain of a preserved node"
	aboutName         = "name"
)

func subjects(uid types.UID) []subject {
	return []subject{{uid, aboutFields}, {uid, aboutWish}, {uid, aboutPreserve}, {uid, aboutPreserveWait}, {uid, aboutName}}
}

// isNews reports whether text differs from the last one about a subject. An empty text
// is no news.
func (o *object) isNews(of, text string) bool {
	before, _ := o.said.Swap(subject{o.machine.UID, of}, text)

	return text != "" && before != text
}

// warnInvalidFields says what is wrong with the machine's fields, once.
func (o *object) warnInvalidFields() {
	all := faults(o.machine)
	if !o.isNews(aboutFields, strings.Join(all, "\n")) {
		return
	}
	for _, fault := range all {
		o.warnf("InvalidField", "%s", fault)
	}
}
