package driversdk

import (
	"context"
	"strings"
	"testing"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// What a driver does to its user data stays unseen: neither by a create
// that runs beside it nor by one that comes later.
func TestServe_UserDataIsTheMethodsOwn(t *testing.T) {
	t.Parallel()
	const stored = "#cloud-config"
	seen := make(chan string, 3)
	wrote := make(chan string, 3)
	entered, both := make(chan struct{}, 3), make(chan struct{})
	w := start(t, &testDriver{onCreate: func(_ context.Context, req *Request[testSpec]) (*Instance, error) {
		entered <- struct{}{}
		<-both
		seen <- string(req.UserData)
		req.UserData[0] = req.Machine.Name[1]
		req.UserData = append(req.UserData, req.Machine.Name...)
		wrote <- string(req.UserData)

		return &Instance{ProviderID: "acme://" + req.Machine.Name}, nil
	}}, nil)
	class := &driverv1.ClassReference{
		Class:  w.store.setClass("c", "1", `{"size":"s"}`),
		Secret: w.store.setSecret("s", "1", map[string]string{userDataKey: stored}),
	}
	first, second := w.ask(create(machine("m1"), class)), w.ask(create(machine("m2"), class))
	<-entered
	<-entered
	close(both)
	first.result()
	second.result()
	w.ask(create(machine("m3"), class)).result()
	for range 3 {
		if got := <-seen; got != stored {
			t.Errorf("user data %q, want %q", got, stored)
		}
		if got := <-wrote; !strings.HasSuffix(got, "configm"+got[:1]) {
			t.Errorf("user data became %q: another create wrote to it", got)
		}
	}
}
