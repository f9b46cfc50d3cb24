package drivertest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// kept is of what the driver may hold a version that has become old.
type kept struct {
	what string
	kind driverv1.Changed_Kind
	// use takes the newest version; it may be called again and again.
	use func(context.Context) error
}

// keeps returns what the driver asks for, of class and secret.
func (s *suite) keeps(ctx context.Context) ([]kept, error) {
	m, id, _, err := s.first(ctx)
	if err != nil {
		return nil, err
	}
	list := func(ctx context.Context) error {
		_, err := s.list(ctx)

		return err
	}
	if err := list(ctx); err != nil {
		return nil, err
	}
	// Not every driver needs the secret to list.
	both := func(ctx context.Context) error {
		if err := list(ctx); err != nil {
			return err
		}
		result, err := s.run(ctx, m, id, s.createBody(m))
		if err == nil {
			_, err = createdOf(result)
		}
		id = m.operation(create)

		return err
	}
	var found []kept
	for _, k := range []kept{{whatClass, driverv1.Changed_KIND_CLASS, list}, {whatSecret, driverv1.Changed_KIND_SECRET, both}} {
		if s.fetches.count(k.what) > 0 {
			found = append(found, k)
		}
	}
	if len(found) == 0 {
		err = skipf("the driver asks for no class")
	}

	return found, err
}

// learn finds out what the driver needs to list. Nothing was asked of it before, so that
// it has no class yet; one that does not answer is a clause's business.
func (s *suite) learn(ctx context.Context) {
	before := s.fetches.count(whatClass)
	_, err := s.list(ctx)
	s.listsByClass = err == nil && s.fetches.count(whatClass) > before
}

// asksAgain tells whether the driver has asked for something since, or does so to make
// another instance, for which it needs all there is. One that lists by its class has to
// ask for that one to list.
func (s *suite) asksAgain(ctx context.Context, what string, before int) (bool, error) {
	if s.fetches.count(what) > before {
		return true, nil
	}
	if what == whatClass && s.listsByClass {
		return false, nil
	}
	_, _, _, err := s.first(ctx)

	return s.fetches.count(what) > before, err
}

// checkVersions names other versions of class and secret than the driver has.
func checkVersions(ctx context.Context, s *suite) error {
	found, err := s.keeps(ctx)
	if err != nil {
		return err
	}
	for range s.cfg.Repeat {
		for _, k := range found {
			before := s.fetches.count(k.what)
			s.fetches.touch()
			if err := k.use(ctx); err != nil {
				return err
			}
			asked, err := s.asksAgain(ctx, k.what, before)
			if err != nil {
				return err
			}
			if !asked {
				return fmt.Errorf("a request named another version of the %s than the driver has, and it did not ask for it", k.what)
			}
		}
	}

	return nil
}

// checkChanged gives word that class and secret have changed, under the versions that
// the driver has.
func checkChanged(ctx context.Context, s *suite) error {
	found, err := s.keeps(ctx)
	if err != nil {
		return err
	}
	announcer, err := bus.NewAnnouncer(s.conn, s.cfg.Cluster)
	if err != nil {
		return err
	}
	for _, k := range found {
		before := s.fetches.count(k.what)
		for _, ref := range s.fetches.named(k.what) {
			if err := announcer.Changed(s.cfg.Provider, &driverv1.Changed{Kind: k.kind, Reference: ref}); err != nil {
				return err
			}
		}
		// Notices and requests come on different subjects, in any order.
		if s.eventually(ctx, "it is asked for", func() (bool, error) {
			err := k.use(ctx)

			return s.fetches.count(k.what) > before, err
		}) == nil {
			continue
		}
		asked, err := s.asksAgain(ctx, k.what, before)
		if err != nil {
			return err
		}
		if !asked {
			return fmt.Errorf("after word that a %s has changed, the driver still uses the one that it had", k.what)
		}
	}

	return nil
}

// withForgery asks the driver for something that takes the secret, which comes
// wrong.
func (s *suite) withForgery(ctx context.Context, wrong forgery) error {
	if s.cfg.Class.SecretRef.Name == "" && s.cfg.Class.CredentialsSecretRef.Name == "" {
		return skipf("the class refers to no secret")
	}
	if _, err := s.list(ctx); err != nil { // it knows our key from now on
		return err
	}
	before := s.fetches.count(whatSecret)
	undo := s.fetches.alter(func(f *fetches) { f.wrong = wrong })
	result, err := s.read(ctx, s.cfg.Class.Name, s.listBody())
	undo()
	switch {
	case err != nil:
		return err
	case s.fetches.count(whatSecret) == before:
		return skipf("the driver lists without the secret")
	case result.GetStatus().GetCode() == driverv1.Code_CODE_OK:
		return errors.New("the driver took it")
	}
	if _, err := s.list(ctx); err != nil {
		return fmt.Errorf("with the genuine secret again: %w", err)
	}

	return nil
}

func checkNonce(ctx context.Context, s *suite) error {
	err := s.withForgery(ctx, otherNonce)
	if _, skipped := errors.AsType[skip](err); err != nil && !skipped {
		err = fmt.Errorf("a secret came with another nonce than was asked with: %w", err)
	}

	return err
}

func checkForged(ctx context.Context, s *suite) error {
	s.fetches.mu.Lock()
	sealed := s.fetches.sealed
	s.fetches.mu.Unlock()
	if !sealed && s.fetches.count(whatSecret) > 0 {
		return skipf("the driver does not open seals")
	}
	err := s.withForgery(ctx, otherKey)
	if _, skipped := errors.AsType[skip](err); err != nil && !skipped {
		err = fmt.Errorf("a secret came sealed with another key than that of the control plane: %w", err)
	}

	return err
}

// checkRefused answers fetches with codes by which an operation would say what there
// is of an instance.
func checkRefused(ctx context.Context, s *suite) error {
	m, _, providerID, err := s.first(ctx)
	if err != nil {
		return err
	}
	m.ProviderId = providerID
	if s.fetches.count(whatClass) == 0 {
		return skipf("the driver does not ask for classes")
	}
	for _, what := range []string{whatClass, whatSecret, whatBootstrap} {
		for _, code := range ofInstances {
			undo := s.fetches.alter(func(f *fetches) { f.refused = refusal{what, code} })
			err := s.passedOn(ctx, m)
			undo()
			if err != nil {
				return fmt.Errorf("its fetch of a %s was answered %s: %w", what, bus.CodeName(code), err)
			}
		}
	}

	return nil
}

// ofInstances are the codes that say what there is of an instance.
var ofInstances = []driverv1.Code{
	driverv1.Code_CODE_NOT_FOUND, driverv1.Code_CODE_OUT_OF_RANGE, driverv1.Code_CODE_UNINITIALIZED,
}

// passedOn fails when an operation says of an instance what was said of the class, the
// secret, or the values for its user data. The machine has one instance.
func (s *suite) passedOn(ctx context.Context, m *machine) error {
	absent := s.newMachine()
	fresh := s.newMachine() // its user data needs values
	for _, ask := range []struct {
		what string
		do   func() (*driverv1.Result, error)
	}{
		{"create of a new machine", func() (*driverv1.Result, error) {
			return s.run(ctx, fresh, fresh.operation(create), s.createBody(fresh))
		}},
		{"create", func() (*driverv1.Result, error) { return s.run(ctx, m, m.operation(create), s.createBody(m)) }},
		{"status", func() (*driverv1.Result, error) { return s.read(ctx, m.GetName(), s.statusBody(m)) }},
		{"list", func() (*driverv1.Result, error) { return s.read(ctx, s.cfg.Class.Name, s.listBody()) }},
		{"delete", func() (*driverv1.Result, error) {
			return s.run(ctx, absent, absent.operation(remove), s.deleteBody(absent))
		}},
	} {
		result, err := ask.do()
		if err != nil {
			return err
		}
		if result.GetInstanceStatus().GetInstance() == nil && slices.Contains(ofInstances, result.GetStatus().GetCode()) {
			return fmt.Errorf("%s was answered %s, which speaks of an instance", ask.what, said(result))
		}
	}

	return nil
}

// checkInbox looks at where the driver asked to be answered.
func checkInbox(_ context.Context, s *suite) error {
	s.fetches.mu.Lock()
	defer s.fetches.mu.Unlock()
	switch {
	case len(s.fetches.outside) > 0:
		return fmt.Errorf("a fetch asked to be answered to %q, not below %q", s.fetches.outside[0], bus.InboxPrefix(s.cfg.Provider)+".")
	case len(s.fetches.counts) == 0:
		return skipf("the driver fetches nothing")
	default:
		return nil
	}
}

// checkTexts gives the driver credentials that are wrong, and looks whether its
// errors repeat them.
func checkTexts(ctx context.Context, s *suite) error {
	for _, secret := range s.cfg.Secrets {
		wrong := map[string][]byte{}
		for key := range secret.Data {
			wrong[key] = []byte("wrong-" + rand.Text())
		}
		undo := s.fetches.alter(func(f *fetches) { f.secret = wrong })
		_, err := s.read(ctx, s.cfg.Class.Name, s.listBody())
		if err == nil {
			m := s.newMachine()
			_, err = s.run(ctx, m, m.operation(create), s.createBody(m))
		}
		undo()
		if err != nil {
			return err
		}
	}

	return s.witnessed("STATUSTEXT-1")
}
