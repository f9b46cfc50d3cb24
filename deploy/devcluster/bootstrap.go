package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
)

// pollEvery is the interval of poll.
const pollEvery = 50 * time.Millisecond

// waitReady returns when /readyz answers.
func waitReady(ctx context.Context, client kubernetes.Interface) error {
	return poll(ctx, "/readyz", func(ctx context.Context) error {
		body, err := client.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Raw()
		if missing := failedChecks(string(body)); err != nil && missing != "" {
			return errors.New(missing)
		}
		return err
	})
}

// failedChecks returns the failed checks of a /readyz report.
func failedChecks(report string) string {
	var failed []string
	for line := range strings.Lines(report) {
		if check, ok := strings.CutPrefix(line, "[-]"); ok {
			failed = append(failed, strings.TrimSpace(check))
		}
	}
	return strings.Join(failed, ", ")
}

// waitDefaultServiceAccount returns when pods can be created in the namespace "default".
func waitDefaultServiceAccount(ctx context.Context, client kubernetes.Interface) error {
	const name = "default"
	return poll(ctx, "the service account default/default", func(ctx context.Context) error {
		_, err := client.CoreV1().ServiceAccounts(metav1.NamespaceDefault).Get(ctx, name, metav1.GetOptions{})
		return err
	})
}

// poll calls ask until it returns nil. If ctx ends first, it returns the last error.
func poll(ctx context.Context, what string, ask func(context.Context) error) error {
	last := errors.New("none")
	err := wait.PollUntilContextCancel(ctx, pollEvery, true, func(ctx context.Context) (bool, error) {
		err := ask(ctx)
		if err != nil && ctx.Err() == nil {
			last = err
		}
		return err == nil, nil
	})
	if err != nil {
		return fmt.Errorf("wait for %s (last answer: %w): %w", what, last, context.Cause(ctx))
	}
	return nil
}

// letNodesJoin binds the API server's built-in roles for kubelets that join by bootstrap token, as "kubeadm init" does.
func letNodesJoin(ctx context.Context, client kubernetes.Interface) error {
	const csrRoles = "system:certificates.k8s.io:certificatesigningrequests:"
	for _, binding := range []struct{ name, role, group string }{
		{"devcluster:node-bootstrap", "system:node-bootstrapper", "system:bootstrappers"},
		{"devcluster:approve-new-nodes", csrRoles + "nodeclient", "system:bootstrappers"},
		{"devcluster:approve-node-renewals", csrRoles + "selfnodeclient", "system:nodes"},
	} {
		_, err := client.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: binding.name},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: binding.role},
			Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: binding.group}},
		}, metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("create ClusterRoleBinding %s: %w", binding.name, err)
		}
	}
	return nil
}
