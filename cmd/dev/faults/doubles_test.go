package main

import (
	"testing"
	"time"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// made and deleted are entries of a cloud's log.
func made(identity cloudapi.Identity, uid, id string, after time.Duration) cloudapi.LogEntry {
	return cloudapi.LogEntry{
		Op: cloudapi.OpCreate, Event: cloudapi.EventCreated, Identity: identity, MachineUID: uid, ID: id, Time: testTime.Add(after),
	}
}

func deleted(uid, id string, after time.Duration) cloudapi.LogEntry {
	return cloudapi.LogEntry{Op: cloudapi.OpDelete, Event: cloudapi.EventDeleted, MachineUID: uid, ID: id, Time: testTime.Add(after)}
}

func TestDoubles(t *testing.T) {
	t.Parallel()
	const token, none = cloudapi.IdentityToken, cloudapi.IdentityNone
	for name, tc := range map[string]struct {
		log    []cloudapi.LogEntry
		want   int
		reason string
	}{
		"one each": {[]cloudapi.LogEntry{made(token, "m", "1", 0), made(none, "n", "2", 0)}, 0, "as it should be"},
		"token":    {[]cloudapi.LogEntry{made(token, "m", "1", 0), deleted("m", "1", 1), made(token, "m", "2", 2)}, 1, "a token is for one instance, for ever"},
		"token, again": {
			[]cloudapi.LogEntry{made(token, "m", "1", 0), made(token, "m", "2", 1), made(token, "m", "3", 2), made(token, "n", "4", 0), made(token, "n", "5", 1)},
			3, "two of one machine and one of another",
		},
		"none, beside two": {
			[]cloudapi.LogEntry{made(none, "m", "1", 0), made(none, "m", "2", 1), made(none, "m", "3", oldestLook+2)},
			1,
			"one instance is too many, beside however many",
		},
		"none, at once":        {[]cloudapi.LogEntry{made(none, "m", "1", 0), made(none, "m", "2", time.Second)}, 0, "no list may have shown the first"},
		"none, much later":     {[]cloudapi.LogEntry{made(none, "m", "1", 0), made(none, "m", "2", oldestLook+1)}, 1, "a list shows the first"},
		"none, one after one":  {[]cloudapi.LogEntry{made(none, "m", "1", 0), deleted("m", "1", 1), made(none, "m", "2", time.Hour)}, 0, "the first is gone"},
		"none, other machines": {[]cloudapi.LogEntry{made(none, "m", "1", 0), made(none, "n", "2", time.Hour)}, 0, "they have nothing to do with each other"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got, _ := doubles(tc.log); total(got)[doubled] != tc.want {
				t.Errorf("doubles = %v, want %d: %s", got, tc.want, tc.reason)
			}
		})
	}
}

// TestDoubles_Surplus counts what no look can have prevented, and what was collected of it.
func TestDoubles_Surplus(t *testing.T) {
	t.Parallel()
	const token, none = cloudapi.IdentityToken, cloudapi.IdentityNone
	for name, tc := range map[string]struct {
		log    []cloudapi.LogEntry
		want   int
		reason string
	}{
		"collected":          {[]cloudapi.LogEntry{made(none, "m", "1", 0), made(none, "m", "2", 1), deleted("m", "1", 2)}, 1, "either may go"},
		"with the machine":   {[]cloudapi.LogEntry{made(none, "m", "1", 0), made(none, "m", "2", 1), deleted("m", "1", 2), deleted("m", "2", 3)}, 1, "one was its own"},
		"still there":        {[]cloudapi.LogEntry{made(none, "m", "1", 0), made(none, "m", "2", 1)}, 0, "it was not collected"},
		"one of two":         {[]cloudapi.LogEntry{made(none, "m", "1", 0), made(none, "m", "2", 1), made(none, "m", "3", 2), deleted("m", "3", 3)}, 1, "the other was not"},
		"one after one":      {[]cloudapi.LogEntry{made(none, "m", "1", 0), deleted("m", "1", 1), made(none, "m", "2", 2), deleted("m", "2", 3)}, 0, "there was never more than one"},
		"much later":         {[]cloudapi.LogEntry{made(none, "m", "1", 0), made(none, "m", "2", oldestLook+1), deleted("m", "2", time.Hour)}, 0, "that is damage"},
		"of another machine": {[]cloudapi.LogEntry{made(none, "m", "1", 0), made(none, "n", "2", 1), deleted("m", "1", 2)}, 0, "each has one"},
		"of a token":         {[]cloudapi.LogEntry{made(token, "m", "1", 0), made(token, "m", "2", 1), deleted("m", "1", 2)}, 0, "that is damage"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if _, got := doubles(tc.log); got != tc.want {
				t.Errorf("surplus %d, want %d: %s", got, tc.want, tc.reason)
			}
		})
	}
}
