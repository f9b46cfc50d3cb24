// Package fetch gives drivers what they ask for: classes, the secrets those
// refer to, and what makes a machine's user data its own. Each only to the
// provider whose class it is, secrets only under seal.
//
// It also tells drivers when a class or a secret has changed, without saying how,
// and keeps the control plane's key. Every replica of the manager serves fetches,
// the leading one or not. Operations are not its business: package dispatch sends
// those.
package fetch
