package drivertest

import (
	"crypto/rand"
	"slices"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/driversdk/drivertest/bench"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

var fetchClauses = []Clause{
	{ID: "REF-1", Says: "fetches the version that a request names", check: checkVersions},
	{ID: "CHANGED-1", Says: "forgets what has changed", binds: full, check: checkChanged},
	{ID: "FETCH-2", Says: "refuses a secret with another nonce", check: checkNonce},
	{ID: "FETCH-3", Says: "opens seals with the key that it trusts", check: checkForged},
	{ID: "FETCH-5", Says: "what a fetch was answered is not told of an instance", check: checkRefused},
	{ID: "FETCH-4", Says: "unsealed answers need the operator's leave and TLS", Manager: true, binds: manager},
}

// A kept object is one of which the driver may hold a version that has become old.
type kept struct {
	what string
	kind driverv1.Changed_Kind
	// use takes the newest version; it may be called again and again.
	use func()
}

// keeps returns what the driver asks for, of class and secret.
func (c *check) keeps() (found []kept) {
	m := c.first()
	o := m.create
	list := func() { c.List() }
	both := func() { // not every driver needs the secret to list
		c.List()
		c.Created(o.Run())
		o = m.Operation(create)
	}
	list()
	for _, k := range []kept{
		{bench.FetchClass, driverv1.Changed_KIND_CLASS, list}, {bench.FetchSecret, driverv1.Changed_KIND_SECRET, both},
	} {
		if c.Fetches.Count(k.what) > 0 {
			found = append(found, k)
		}
	}
	if len(found) == 0 {
		c.Skipf("the driver asks for no class")
	}

	return found
}

// asksAgain reports whether the driver has asked for an object since, or does so to make another instance, for which it
// needs all there is. One that lists by its class has to ask for that one to list.
func (c *check) asksAgain(what string, before int) bool {
	if c.Fetches.Count(what) == before && (what != bench.FetchClass || !c.suite.listsByClass) {
		c.first()
	}

	return c.Fetches.Count(what) > before
}

// checkVersions names other versions of class and secret than the driver has.
func checkVersions(c *check) {
	found := c.keeps()
	for range c.Repeat {
		for _, k := range found {
			before := c.Fetches.Count(k.what)
			c.Fetches.Touch()
			k.use()
			if !c.asksAgain(k.what, before) {
				c.Failf("a request named another version of the %s than the driver has, and it did not ask for it", k.what)
			}
		}
	}
}

// checkChanged announces that class and secret have changed, under the versions that the driver has.
func checkChanged(c *check) {
	for _, k := range c.keeps() {
		before := c.Fetches.Count(k.what)
		for _, ref := range c.Fetches.Named(k.what) {
			c.Changed(k.kind, ref)
		}
		// Notices and requests come on different subjects, in any order.
		if !c.Poll(c.Patience, func() bool {
			k.use()

			return c.Fetches.Count(k.what) > before
		}) && !c.asksAgain(k.what, before) {
			c.Failf("after a notice that a %s has changed, the driver still uses the one that it had", k.what)
		}
	}
}

// refusesSecret asks the driver to list, for which it gets wrong secrets, and then the right ones.
func refusesSecret(c *check, wrong bench.Answers) {
	if c.Class.SecretRef.Name == "" && c.Class.CredentialsSecretRef.Name == "" {
		c.Skipf("the class refers to no secret")
	}
	c.List() // it knows our key from now on
	before := c.Fetches.Count(bench.FetchSecret)
	var result *driverv1.Result
	c.Fetches.With(wrong, func() { result = c.ListResult() })
	if c.Fetches.Count(bench.FetchSecret) == before {
		c.Skipf("the driver lists without the secret")
	}
	if result.GetStatus().GetCode() == ok {
		c.Failf("the driver took it")
	}
	c.Step("with the genuine secret again", func() { c.List() })
}

func checkNonce(c *check) {
	c.Step("a secret came with another nonce than was asked with", func() { refusesSecret(c, bench.Answers{Nonce: true}) })
}

func checkForged(c *check) {
	if !c.Fetches.Seen().Opens && c.Fetches.Count(bench.FetchSecret) > 0 {
		c.Skipf("the driver does not open seals")
	}
	c.Step("a secret came sealed with another key than that of the control plane", func() { refusesSecret(c, bench.Answers{Seal: true}) })
}

// ofInstances are the codes that say what there is of an instance.
var ofInstances = []driverv1.Code{
	driverv1.Code_CODE_NOT_FOUND, driverv1.Code_CODE_OUT_OF_RANGE, driverv1.Code_CODE_UNINITIALIZED,
}

// checkRefused answers fetches with codes by which an operation would say what there
// is of an instance.
func checkRefused(c *check) {
	m := c.firstNamed()
	if c.Fetches.Count(bench.FetchClass) == 0 {
		c.Skipf("the driver does not ask for classes")
	}
	for _, kind := range []string{bench.FetchClass, bench.FetchSecret, bench.FetchBootstrap} {
		for _, code := range ofInstances {
			c.Step("its fetch of a "+kind+" was answered "+bus.CodeName(code), func() {
				c.Fetches.With(bench.Answers{Refused: kind, Code: code}, func() { passesOn(c, m) })
			})
		}
	}
}

// passesOn fails if an operation says of an instance what was said of the class, the
// secret, or the values for its user data. The machine has one instance.
func passesOn(c *check, m *made) {
	for _, asked := range []struct {
		what string
		do   func() *driverv1.Result
	}{
		{"create of a new machine", func() *driverv1.Result { return c.NewMachine().Do(create) }}, // its user data needs values
		{"create", func() *driverv1.Result { return m.Do(create) }},
		{"status", m.StatusResult},
		{"list", c.ListResult},
		{"delete", func() *driverv1.Result { return c.NewMachine().Do(remove) }},
	} {
		result := asked.do()
		if result.GetInstanceStatus().GetInstance() == nil && slices.Contains(ofInstances, result.GetStatus().GetCode()) {
			c.Failf("%s was answered %s, which speaks of an instance", asked.what, bench.Said(result))
		}
	}
}

// checkInbox looks at where the driver asked to be answered.
func checkInbox(c *check) {
	seen := c.Fetches.Seen()
	if len(seen.Outside) > 0 {
		c.Failf("a fetch asked to be answered to %q, not below %q", seen.Outside, c.Fetches.InboxPrefix())
	}
	if len(seen.Counts) == 0 {
		c.Skipf("the driver fetches nothing")
	}
}

// checkTexts gives the driver credentials that are wrong, and looks whether its
// errors repeat them.
func checkTexts(c *check) {
	for _, secret := range c.Secrets {
		wrong := map[string][]byte{}
		for key := range secret.Data {
			wrong[key] = []byte("wrong-" + rand.Text())
		}
		c.Fetches.With(bench.Answers{Secret: wrong}, func() {
			c.ListResult()
			c.NewMachine().Do(create)
		})
	}
	c.Witnessed("STATUSTEXT-1")
}
